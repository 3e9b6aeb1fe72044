"""What runs in the processes of a soak's job: a trainer rank, an inference rank, a supervisor. Each writes down what it is
told and what it finds in its own tensors, a line of JSON each, into a file of its own that outlives it.

An inference rank looks at its live weights between its installs, where an engine would serve with them, and works every value
out again from the label of the version that it was told. It knows nothing of slots, cells or movers.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

import elastic_reshard as er
from chaos import plants
from elastic_reshard.bench import values
from elastic_reshard.errors import Fenced, NotAMember, ReshardError
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.layout.dtensor import torch_dtype
from elastic_reshard.protocol import hooks
from elastic_reshard.supervisor import parties
from elastic_reshard.supervisor.record import Record
from elastic_reshard.supervisor.server import Options, Supervisor

__all__ = ["AGAIN", "Part", "Records", "engine", "supervisor", "trainer"]

T = TypeVar("T")
AGAIN = 3  # exit status of a process that wants to be started again, as an orchestrator would
# 2 MiB, uneven, replicated, three-dimensional, of two item sizes.
SHAPES: Mapping[str, Any] = {
    "wide": ((512, 768), "float32", 0),
    "odd": ((7, 1001), "float32", 0),
    "experts": ((3, 64, 1024), "bfloat16", 1),
    "bias": ((3001,), "float32", None),
}
PUBLISH, COMMIT, RECEIVE, INSTALL, WATCH, JOIN = 10.0, 5.0, 10.0, 8.0, 1.0, 30.0  # seconds that calls are given
_STEPS = ("claimed", "copied", "offered"), ("granted", "pulling", "pulled", "reported")


@dataclass(frozen=True)
class Part:
    """Who a process is, and where."""

    name: str
    group: str
    size: int
    rank: int
    role: str
    host: str
    url: str
    token: str
    runtime: str
    records: str
    injected: plants.Injected
    environ: Mapping[str, str] = field(default_factory=dict)


class Records:
    """A file of lines. A line is one write: a process that is killed has written it, or not."""

    def __init__(self, path: str, who: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._who, self._calls = who, 0

    def put(self, kind: str, **fields: Any) -> None:
        """One line."""
        line = {"t": time.monotonic(), "who": self._who, "pid": os.getpid(), "kind": kind, **fields}
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def call(self, what: str, limit: float, fn: Callable[[], T]) -> T | ReshardError:
        """A public call, with the time it was given: its result, or the error of the package that it ended by."""
        self._calls += 1
        number, begun = self._calls, time.monotonic()
        self.put("call", call=what, number=number, limit=limit)
        found: T | ReshardError
        try:
            found = fn()
        except ReshardError as error:
            found = error
        told = {"error": "", "text": ""}
        if isinstance(found, ReshardError):
            told = {"error": type(found).__name__, "text": str(found)[:600]}
        self.put("ended", call=what, number=number, limit=limit, seconds=time.monotonic() - begun, **told)
        return found


def _player(run: Callable[[Connection, Part, Records], int]) -> Callable[[Connection, Part], None]:
    """A process's main: its log, its records, what it does to itself; it ends here, whatever its threads do."""

    @functools.wraps(run)
    def main(pipe: Connection, part: Part) -> None:
        code = 1
        records = Records(part.records, part.name)
        try:
            torch.set_num_threads(1)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.environ.update(part.environ)
            log = Path(part.records).with_suffix(".log")
            logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
            plants.plant(part.injected)
            publish, install = _STEPS
            points = [f"member.publish.{step}" for step in publish] + [f"member.install.{step}" for step in install]
            hooks._armed = plants.Held(points, 0.04, 0.4)
            code = run(pipe, part, records)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = 0  # the soak is over
        except BaseException:  # noqa: BLE001 - whatever it is, it is written down
            records.put("crashed", text=traceback.format_exc()[-4000:])
        finally:
            records.put("exit", code=code)
            sys.stdout.flush()
            os._exit(code)

    return main


def _join(part: Part, records: Records, tensors: Any, layout: Any) -> Any:
    found = records.call(
        "join",
        JOIN,
        lambda: er.join(
            part.url, name=part.name, group=er.Group(part.group, part.size, part.rank), role=part.role,  # type: ignore[arg-type]
            tensors=tensors, layout=layout, runtime=part.runtime, token=part.token, host=part.host, deadline=JOIN,
        ),
    )  # fmt: skip
    if not isinstance(found, ReshardError):
        records.put("joined", id=found.id)
    return found


def _sides(part: Part) -> tuple[ModelLayout, dict[str, torch.Tensor]]:
    """The layout of its group, and this rank's tensors. Engines shard another dim than trainers."""
    turn, mesh = int(part.role == "destination"), Mesh.arange((part.size,))
    layout = ModelLayout(
        {
            name: TensorLayout(shape, dtype, mesh, (Replicate() if dim is None else Shard((dim + turn) % len(shape)),))
            for name, (shape, dtype, dim) in SHAPES.items()
        }
    )
    tensors = {
        name: torch.zeros(shape, dtype=torch_dtype(t.dtype))
        for name, t in layout.items()
        if (shape := t.local_shape(part.rank)) is not None
    }
    values.poison(tensors)
    return layout, tensors


@_player
def trainer(pipe: Connection, part: Part, records: Records) -> int:
    """Publish each step that comes through the pipe; say when that is done."""
    layout, tensors = _sides(part)
    member = _join(part, records, tensors, layout)
    if isinstance(member, ReshardError):
        return AGAIN
    pipe.send("ready")
    while True:
        step = pipe.recv()
        values.fill(layout, tensors, part.rank, step)
        found = records.call("publish", PUBLISH, lambda step=step: member.publish(f"s{step}", timeout=PUBLISH))
        values.poison(tensors)  # what is in the slot is a copy
        if isinstance(found, NotAMember):
            return AGAIN
        if not isinstance(found, ReshardError):
            records.put("published", step=step)
            version = records.call("wait", COMMIT, lambda found=found: found.wait("committed", COMMIT))
            if isinstance(version, NotAMember):
                return AGAIN
            if isinstance(version, int):
                records.put("committed", step=step, version=version)
            elif isinstance(version, ReshardError):
                records.put("not_committed", step=step, error=type(version).__name__, text=str(version)[:600])
        pipe.send("ready")


@_player
def engine(pipe: Connection, part: Part, records: Records) -> int:
    """Install whatever is newer, serve with it, look at it."""
    layout, tensors = _sides(part)
    member = _join(part, records, tensors, layout)
    if isinstance(member, ReshardError):
        return AGAIN
    labels: dict[int, str | None] = {}
    chance = random.Random()
    while not pipe.poll():
        found: int | ReshardError | None = None
        if chance.random() < 0.1:
            found = records.call("receive", RECEIVE, lambda: member.receive(RECEIVE))
        elif (newer := _newer(member, records)) is True:
            found = records.call("install", INSTALL, lambda: member.install(INSTALL)["weight_version"])
        else:
            found = newer or None
        if isinstance(found, NotAMember):
            return AGAIN
        if isinstance(found, int):
            last = member.last_install
            labels[found] = last["label"]
            records.put("installed", version=found, label=last["label"], nbytes=last["nbytes"], changed=last["changed"])
        _serve(member, layout, tensors, part.rank, labels, records, 0.05 + 0.3 * chance.random())
    return 0


def _newer(member: er.Member, records: Records) -> bool | ReshardError:
    """Wait a moment for a version that can be installed; whether there is one, or the error that was told instead."""
    events, until = member.watch(timeout=WATCH), time.monotonic() + WATCH
    while time.monotonic() < until:
        event = records.call("watch", WATCH, lambda: next(events, None))
        if not isinstance(event, er.Event):
            return event or False
        if event.kind == "installable":
            return True
    return False


def _serve(
    member: er.Member,
    layout: Any,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    labels: Mapping[int, str | None],
    records: Records,
    seconds: float,
) -> None:
    """A serving section: the member says which version its tensors hold; every value of them is worked out again."""
    until = time.monotonic() + seconds
    while True:
        begun, version = time.monotonic(), member.weight_version
        if version:
            label = labels.get(version)
            wrong = values.wrong(layout, tensors, rank, int(label[1:])) if label is not None else []
            end, after = time.monotonic(), member.weight_version
            records.put("served", version=version, after=after, label=label, known=version in labels, wrong=wrong,
                        begun=begun, end=end)  # fmt: skip
        if time.monotonic() >= until:
            return
        time.sleep(0.02)


def supervisor(pipe: Connection, options: Options, records_path: str, injected: plants.Injected) -> None:
    """A supervisor until the pipe ends or says "over", or it ends by itself; what it records is written down too."""
    records, code = Records(records_path, "supervisor"), 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        log = Path(records_path).with_suffix(".log")
        logging.basicConfig(filename=log, level=logging.WARNING, format="%(asctime)s %(message)s", force=True)
        plants.plant(injected)
        _small_rounds()
        _write_down(records)
        running = Supervisor(options)
        records.put("serving", term=running.term)
        pipe.send((running.url, running.term))
        while not running.wait(0.0):
            if pipe.poll(0.1):
                over = _last_word(pipe) == "over"
                running.close(over=over)
                code = 0
                return
    except Fenced as error:
        records.put("fenced", text=str(error))
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is written down
        records.put("crashed", text=traceback.format_exc()[-4000:])
    finally:
        records.put("exit", code=code)
        os._exit(code)


def _last_word(pipe: Connection) -> str:
    try:
        return str(pipe.recv())
    except (EOFError, OSError):
        return ""


def _small_rounds() -> None:
    """Plans of many rounds, so that a transfer of 2 MiB can be broken in its middle."""
    usual = parties.PlanOptions
    parties.PlanOptions = lambda message, staging, **rest: usual(message=1 << 15, staging=1 << 17, **rest)  # type: ignore


def _write_down(records: Records) -> None:
    add = Record.add

    def both(self: Record, event: str, fields: Mapping[str, Any]) -> None:
        plain = {k: v if isinstance(v, str | int | float | list | dict | None) else str(v) for k, v in fields.items()}
        records.put("event", event=event, fields=plain)
        add(self, event, fields)

    Record.add = both  # type: ignore[method-assign]
