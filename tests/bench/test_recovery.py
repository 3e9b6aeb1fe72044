"""`bench recovery` at small sizes: bytes and outcomes, not times. That it would see what is wrong. That nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from typer.testing import CliRunner

from elastic_reshard.bench import census, recovery, stage
from elastic_reshard.bench import rank as on
from elastic_reshard.bench import recovery_faults as faults
from elastic_reshard.bench.play import Play, Shot, distinct
from elastic_reshard.bench.recovery_warm import warm
from elastic_reshard.bench.rows import Row
from elastic_reshard.bench.stage import Stage
from elastic_reshard.bench.synthetic import Layouts, transformer, uniform
from elastic_reshard.cli import app
from elastic_reshard.errors import ReshardError
from elastic_reshard.layout import match
from elastic_reshard.watchdog.runtime import VARIABLE

MODEL, SMALL = transformer(48 << 20, 2, 2, 2), transformer(4 << 20, 2, 1, 2)


@pytest.fixture(scope="module", autouse=True)
def _first_stage() -> None:
    """What stays for this process's life is made here: the forkserver, and the pipe of libuv's first loop."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Stage():
        pass


def right(row: Row) -> bool:
    assert row.right, row.to_data()
    return row.right


@pytest.mark.long
def test_what_is_measured_is_right_in_bytes_and_outcomes() -> None:
    """A refit beside its bare parts, a killed mover, a killed supervisor, a joiner."""
    with Stage() as made:
        play = Play(made, MODEL, recovery.TRAINERS, recovery.ENGINES)
        rows, whole = warm(made, play, 1, lambda _: None)
        overhead, landed = map(Row.to_data, rows)
        assert all(map(right, rows))
        assert landed["value"] == 0
        assert landed["beside"]["landed"] == {"a": 0, "b": 0, "c": MODEL.nbytes, "d": MODEL.nbytes}
        assert overhead["value"] is not None
        killed = faults.mover_killed(play, "receiving", play.engines[0], whole, times=1)
        assert right(killed)
        assert killed.beside["moved twice"] <= killed.beside["in flight"]
        assert right(faults.supervisor_killed(made, play))
        joined = faults.joiner(made, play)
        assert right(joined)
        assert not {name.split("@")[0] for name in joined.beside["sent by"]} & {"trainer-0", "trainer-1"}
        assert play.wrong == []
    assert made.left == [], "all went by itself"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_command_measures_everything() -> None:
    command = [sys.executable, "-m", "elastic_reshard", "bench", "recovery", "--mib", "48", "--repeats", "1",
               "--rebuilds", "10", "--json"]  # fmt: skip
    told = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    rows: list[dict[str, Any]] = json.loads(told.stdout)
    assert len(rows) == 9
    assert all(row["right"] for row in rows)
    assert all(row["value"] is not None for row in rows)


# -- it would see what is wrong


@pytest.mark.parametrize(("again", "twice"), [(40, 0), (55, 15), (60, 20), (70, 30)])
def test_what_had_landed_and_moves_again_is_more_than_was_in_flight(again: int, twice: int) -> None:
    """Of 100 bytes 40 had landed and 20 were in flight: at most 60 are to be moved then."""
    played: Any = None
    shot = Shot(0.0, played, landed=40, begun=60, total=100, played=played, again=again)
    assert (shot.flying, shot.twice) == (20, twice)
    assert (shot.twice <= shot.flying) == (again <= 60)
    assert shot.remaining(10.0) == 6.0


def test_what_is_wrong_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_right in (True, False):
        rows = [Row("a figure", 1.0, "s", "<= 2 s", True, is_right)]
        monkeypatch.setattr(recovery, "measure_recovery", lambda *_, rows=rows: rows)
        told = CliRunner().invoke(app, ["bench", "recovery", "--mib", "4"])
        assert told.exit_code == (0 if is_right else 1)


def test_descriptors_threads_and_memory_are_counted() -> None:
    before = census.count([os.getpid()])
    held = os.memfd_create("held")
    try:
        os.truncate(held, 1 << 20)
        os.pwrite(held, bytes(1 << 20), 0)
        after = census.count([os.getpid()])
    finally:
        os.close(held)
    assert after.descriptors == before.descriptors + 1
    assert (after.memfds, after.memfd) == (before.memfds + 1, before.memfd + (1 << 20))
    assert (after.processes, after.threads) == (before.processes, before.threads)
    assert census.count([1 << 30]).processes == 0


# -- nothing is left, whatever happens


def _living(folder: Path) -> list[tuple[int, int, str]]:
    return list(census.started_with(f"{VARIABLE}={folder}"))


@pytest.mark.long
def test_a_wrong_byte_is_seen_and_an_error_on_stage_leaves_nothing() -> None:
    made = Stage()
    with pytest.raises(ReshardError, match="ZeroDivisionError"):  # noqa: PT012, SIM117 - what is on stage sees its end
        with made:
            play = Play(made, SMALL, ["a", "b"], [["c", "c"]])
            play.refit()
            assert play.wrong == []
            play.engines[0][1].do(on.fill, 7)
            play.look(play.engines[0])
            assert len(play.wrong) == 1
            assert "engine-0 rank 1, version 1" in play.wrong[0]
            assert {kind for *_, kind in _living(made.folder)} == {"watchdogs", "nursery and movers"}
            play.trainer[0].do(divide)
    assert not _living(made.folder)
    assert not made.folder.exists()


def divide(_: on.State) -> float:
    return 1 / 0


@pytest.mark.long
def test_who_does_not_go_by_itself_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_GOODBYE", 0.5)
    with Stage() as made:
        play = Play(made, SMALL, ["a", "b"], [["c", "c"]])
        play.refit()
        mover = made.movers()[play.trainer[0].id]
        made.kill_supervisor()  # then nobody says that the job is over
        os.kill(mover, signal.SIGSTOP)
    assert f"nursery and movers {mover}" in made.left
    assert not _living(made.folder)


# -- models


@pytest.mark.parametrize("layouts", [MODEL, transformer(4 << 20, 2, 3, 2), uniform(16 << 20, 2, 2, 2)])
def test_models_are_of_the_size_that_was_asked_for(layouts: Layouts) -> None:
    asked = next(n for n in (4 << 20, 16 << 20, 48 << 20) if n >= 0.98 * layouts.nbytes)
    assert 0.9 * asked <= layouts.nbytes <= 1.02 * asked
    assert layouts.source.nbytes == layouts.destination.nbytes == layouts.together.nbytes
    assert list(match(layouts.source, layouts.destination))
    assert distinct(layouts.destination, range(2)) == layouts.nbytes
    assert 0.5 * layouts.nbytes <= distinct(layouts.destination, [1]) < 0.6 * layouts.nbytes
