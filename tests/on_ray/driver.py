"""A driver that keeps groups, as a program of its own: told what to do by lines on stdin, each answered by one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import ray

from elastic_reshard.errors import ReshardError
from elastic_reshard.on_ray import Fleet, Groups, Limits
from tests.on_ray.workers import Engine, Napper, Trainer

MANY = {"max_concurrency": 4}


def fleets(job: str, runtime: str) -> list[Fleet]:
    """A gang of two, and two engines; or one that only sleeps."""
    if job == "naps":
        return [Fleet("napper", Napper, each={"CPU": 1, "one": 1}, options=MANY)]
    given = {"job": job, "runtime": runtime}
    return [
        Fleet("trainer", Trainer, size=2, each={"CPU": 0.5, "one": 1}, arguments=given, options=MANY),
        Fleet("engine", Engine, groups=2, each={"CPU": 0.5, "two": 1}, arguments=given, options=MANY),
    ]


def answer(groups: Groups, words: list[str]) -> Any:
    match words:
        case ["status"]:
            return {name: [str(run.phase), run.attempt, run.reason] for name, run in groups.status().items()}
        case ["resize", fleet, count]:
            return groups.resize(fleet, int(count))
        case ["close"]:
            return groups.close()
        case ["fall"]:
            raise RuntimeError("a mistake in the program")
    raise AssertionError(words)


def main(address: str, job: str, runtime: str) -> None:
    ray.init(address=address, _node_ip_address="127.0.0.2", log_to_driver=False, logging_level="ERROR")
    with Groups(job, fleets(job, runtime), Limits(pause=0.1), adopt=True) as groups:
        for line in sys.stdin:
            try:
                said = {"said": answer(groups, line.split())}
            except ReshardError as error:
                said = {"raised": type(error).__name__, "why": str(error)}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
