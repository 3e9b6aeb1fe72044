"""What `chaos.nccl_hang` shows under this project, on a pretended device: whole tensors moved as M2N does, in real movers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from chaos import hang_bare, hang_project, nccl_hang
from elastic_reshard.bench.gpu_stage import DeviceStage, Kit
from elastic_reshard.bench.play import Play
from elastic_reshard.bench.synthetic import transformer
from elastic_reshard.errors import TransferTimeout
from elastic_reshard.plan import Destination, Plan, PlanOptions, Source, Topology
from elastic_reshard.plan.m2n import fast_part


@pytest.mark.long
def test_a_mover_killed_in_an_m2n_transfer_is_replaced_and_every_byte_arrives() -> None:
    layouts = transformer(16 << 20, 2, 1, 2)
    plan = Plan(
        (Source(layouts.source, (0, 1)),), (Destination(layouts.destination, (2, 3)),), Topology.isolated(4),
        PlanOptions(landing=True),
    )  # fmt: skip
    assert not fast_part(plan).reasons, "all of it goes by M2N"
    with DeviceStage(Kit("pretend", 1, "device", "anytime", "pretend_m2n")) as stage:
        game = Play(stage, layouts, hang_project.TRAINERS, hang_project.ENGINES)
        game.refit()
        assert hang_project._network(game) == "pretend_m2n"
        received = sum(said.received for doc in stage.client.hosts().values() for said in doc.movers.values())
        assert received == layouts.nbytes + sum(t.nbytes for n, t in layouts.destination.items() if "norm" in n)
        victim = game.engines[0][0].id
        hit: list[int] = []

        def inflict() -> None:
            hit.append(stage.movers()[victim])
            os.kill(hit[-1], signal.SIGKILL)

        while game.shoot(inflict, lambda *_: True) is None:
            pass
        assert stage.movers()[victim] != hit[-1]
        assert hang_project._untouched(game) == []
        assert game.wrong == []
    assert stage.left == []


def test_without_a_gpu_the_bare_half_is_skipped_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert nccl_hang.main(["--device", "pretend", "--part", "bare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bare"] == {"skipped": "no CUDA device"}


@pytest.mark.long
@pytest.mark.parametrize("network", ["pretend", "pretend_m2n"])
def test_the_whole_program(network: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert nccl_hang.main(["--device", "pretend", "--part", "project", "--json", "--networks", network]) == 0
    found = json.loads(capsys.readouterr().out)[network]
    assert len(found["rows"]) == 5
    assert all(row["right"] for row in found["rows"])


class _Stage:
    """A job of which rows are played; some fail."""

    made = 0

    def __init__(self, _: Any) -> None:
        self.left: list[str] = []
        type(self).made += 1

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.left.append(f"of {self.made}")


class _Game:
    def __init__(self, *_: Any) -> None:
        self.wrong: list[str] = []

    def refit(self) -> None:
        """Always right."""


def test_a_row_that_fails_under_this_project_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> dict[str, Any]:
        raise TransferTimeout("it did not end")

    def right(*_: Any) -> dict[str, Any]:
        return {"right": True}

    def gone(*_: Any) -> dict[str, Any]:
        raise OSError("no such process")

    rows = {"first": right, "second": fails, "third": right, "fourth": gone}
    monkeypatch.setattr(hang_project, "DeviceStage", _Stage)
    monkeypatch.setattr(hang_project, "Play", _Game)
    monkeypatch.setattr(hang_project, "_network", lambda _: "pretend")
    monkeypatch.setattr(hang_project, "_rows", lambda: iter(rows.items()))
    told: list[int] = []
    found = hang_project.play(
        Kit("pretend", 1, "device", "anytime", "pretend"), 1 << 20, lambda d: told.append(len(d["rows"]))
    )
    assert told == [1, 2, 3, 4]
    assert [row["what"] for row in found["rows"]] == list(rows)
    assert [row.get("error", "").partition(":")[0] for row in found["rows"]] == ["", "TransferTimeout", "", "OSError"]
    assert not found["right"]
    assert (_Stage.made, found["left"]) == (2, ["of 1", "of 2"]), "those after it have a fresh job"


def test_a_bare_case_whose_processes_are_gone_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranks:
        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Ranks:
            return self

        def __exit__(self, *_: object) -> None: ...

    errors = iter([BrokenPipeError("gone"), ProcessLookupError("no such process"), TransferTimeout("late")])

    def case(*_: Any) -> dict[str, Any]:
        raise next(errors, RuntimeError("of CUDA"))

    monkeypatch.setattr(hang_bare.on, "Ranks", Ranks)
    monkeypatch.setattr(hang_bare, "_case", case)
    rows = list(hang_bare.play(4, 1, 5.0))
    assert len(rows) == len(hang_bare.cases()) == 7
    kinds = [row["error"].partition(":")[0] for row in rows]
    assert kinds[:4] == ["BrokenPipeError", "ProcessLookupError", "TransferTimeout", "RuntimeError"]


def test_each_row_is_in_the_file_before_the_part_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows_part.py").write_text("""
import time
print('{"rows": [1]}', flush=True)
print('{"rows": [1, 2]}', flush=True)
time.sleep(600)
""")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    kept: list[Any] = []
    monkeypatch.setattr(nccl_hang, "keep_result", lambda _, data: kept.append(json.loads(json.dumps(data))))
    found: dict[str, Any] = {}
    nccl_hang._part(found, "bare", ["rows_part"], 2.5, tmp_path / "kept.json")
    assert {"bare": {"rows": [1, 2]}} in kept[:-1], "while it ran"
    assert found["bare"]["rows"] == [1, 2]
    assert found["bare"]["error"].startswith("not done")
