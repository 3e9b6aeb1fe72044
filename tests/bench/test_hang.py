"""What `chaos.nccl_hang` shows under this project, on a pretended device: whole tensors moved as M2N does, in real movers."""

from __future__ import annotations

import json
import os
import signal

import pytest

from chaos import hang_project, nccl_hang
from elastic_reshard.bench.gpu_stage import DeviceStage, Kit
from elastic_reshard.bench.play import Play
from elastic_reshard.bench.synthetic import transformer
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
