"""`bench gpu` without a GPU: values made by torch, parts under a deadline, and what a pretended device can run."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_reshard.bench import gpu_model, gpu_part, gpu_pulls, gpu_values, gpu_ways, guarded, values
from elastic_reshard.bench.census import started_with
from elastic_reshard.bench.gpu import DEFAULT, SECTIONS, allotted, failed, figures, measure_gpu, right, setup_here
from elastic_reshard.bench.gpu_part import OWN
from elastic_reshard.bench.gpu_setup import GpuSetup, layers_of, many_small, model_layouts
from elastic_reshard.bench.gpu_ways import Tell, run_ways
from elastic_reshard.bench.play import Play
from elastic_reshard.bench.stage import until
from elastic_reshard.errors import CatalogError, LayoutError, TransferTimeout
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout

TINY = GpuSetup("tiny", "pretend", 0, scale=0.01)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "float32", "int64"])
def test_values_by_torch_are_the_same_bits_as_numpys(dtype: str) -> None:
    mesh = Mesh.arange((2,))
    layout = ModelLayout({
        "a": TensorLayout((1000, 330), dtype, mesh, (Shard(0),)), "b": TensorLayout((7, 4, 1025), dtype, mesh, (Shard(2),)),
        "n": TensorLayout((5,), dtype, mesh, (Replicate(),)),
    })  # fmt: skip
    for rank in (0, 1):
        shapes = {n: t.local_shape(rank) for n, t in layout.items()}
        tensors = {n: torch.zeros(s, dtype=torch.uint8).view(torch.bool) if dtype == "bool" else
                   torch.zeros(s, dtype=getattr(torch, dtype)) for n, s in shapes.items() if s is not None}  # fmt: skip
        values.fill(layout, tensors, rank, 3)
        assert gpu_values.wrong(layout, tensors, rank, 3) == []
        assert gpu_values.wrong(layout, tensors, rank, 4) == ["a", "b", "n"]
        gpu_values.poison(tensors)
        gpu_values.fill(layout, tensors, rank, 5)
        assert values.wrong(layout, tensors, rank, 5) == []
        tensors["b"].view(torch.uint8).view(-1)[-1] ^= 1
        assert gpu_values.wrong(layout, tensors, rank, 5) == ["b"]


def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> list[str]:
    (tmp_path / "a_part.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return ["a_part"]


def test_a_part_gives_its_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = guarded.run_part(_program(tmp_path, monkeypatch, "print('noise')\nprint('{\"a\": 1}')"), 20)
    assert (outcome.data, outcome.error, outcome.left) == ({"a": 1}, "", ())
    assert outcome.to_data()["a"] == 1


def test_a_part_that_crashes_is_reported_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = guarded.run_part(_program(tmp_path, monkeypatch, "raise ValueError('it broke here')"), 20)
    assert outcome.data is None
    assert "exit code 1" in outcome.error
    assert "it broke here" in outcome.error


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no signal, and its child is in a session of its own."""
    text = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([{sys.executable!r}, "-c", "import time; time.sleep(600)"], start_new_session=True)
print('{{"so far": 2}}', flush=True)
time.sleep(600)
"""
    monkeypatch.setattr(guarded, "_GRACE", 0.3)
    monkeypatch.setattr(guarded, "_GOES", 0.3)
    begun = time.monotonic()
    outcome = guarded.run_part(_program(tmp_path, monkeypatch, text), 1.5)
    assert time.monotonic() - begun < 15
    assert outcome.error.startswith("not done in 1.5 s")
    assert outcome.data == {"so far": 2}
    assert len(outcome.left) == 1
    assert not list(started_with(f"PYTHONPATH={os.environ['PYTHONPATH']}"))


def test_pulls_of_a_model_are_bit_exact_each_way() -> None:
    found = gpu_pulls.measure(TINY)
    for part in ("full list", "many small"):
        assert found[part]["wrong"] == []
        assert found[part]["kernel"]["ms"] > 0
        assert found[part]["engine"]["ms"] > 0
        assert "need a GPU" in found[part]["graph"]["skipped"]


def test_a_run_reports_what_it_was_asked_for_and_what_it_could_not_do() -> None:
    said: list[str] = []
    found = measure_gpu(TINY, said.append, ["environment", "m2n"])
    assert [word.partition(" ")[0] for word in said] == ["environment", "m2n"]
    assert found["environment"]["cores"] >= 1
    assert "needs a GPU" in found["m2n"]["skipped"]
    assert found["failed"] == []
    assert found["right"]
    assert {row["kept"] for row in found["figures"]} == {None}
    json.dumps(found)


def test_a_driver_that_does_not_answer_costs_one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        """As in pynvml: of no other kind."""

    def fails() -> None:
        raise NVMLError("driver not loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=fails))
    assert gpu_part._driver() == "unknown: driver not loaded"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_part._driver() == "unknown: no pynvml"


# Seconds that sections took at most on one H200, and on two with 20 layers of Qwen3-30B-A3B, on 2026-11-29 and -30. By
# estimate: domains, recover and survive on one, pulls on two.
NEEDED = {
    False: {"environment": 9.1, "limits": 26.8, "pulls": 20.6, "model": 62.3, "share": 75.4, "domains": 60.0, "recover": 60.0,
            "survive": 45.0, "m2n": 62.7},
    True: {"environment": 8.0, "limits": 19.3, "pulls": 20.6, "model": 46.0, "share": 65.1, "domains": 62.4, "recover": 58.9,
           "survive": 52.7, "m2n": 30.7},
}  # fmt: skip


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("hanging", [(), ("share",), ("model", "domains"), tuple(SECTIONS)])
def test_the_default_time_is_enough_for_every_section(several: bool, hanging: tuple[str, ...]) -> None:
    """Whatever those before it do: each has what it needs before it would end itself."""
    left, names = DEFAULT[several], list(SECTIONS)
    assert set(NEEDED[several]) == set(names)
    for number, name in enumerate(names):
        mine = allotted(names[number:], left, several=several)
        assert OWN * mine >= NEEDED[several][name], name
        left -= mine if name in hanging else NEEDED[several][name]
    assert left >= 0
    assert DEFAULT[several] <= 510, "eight minutes and a half"


def test_what_is_begun_without_time_left_is_said_to_be_so() -> None:
    found = measure_gpu(GpuSetup("tiny", "pretend", 0, seconds=1.0, scale=0.01), lambda _: None)
    assert all("not begun" in found[name]["error"] for name in SECTIONS)
    assert found["failed"] == list(SECTIONS)


def test_what_a_section_had_told_is_kept_when_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import time
print('{"first": {"ms": 1}}', flush=True)
print('{"first": {"ms": 1}, "second": {"m', end="", flush=True)
time.sleep(600)
"""
    told: list[Any] = []
    outcome = guarded.run_part(_program(tmp_path, monkeypatch, text), 2.5, told.append)
    assert outcome.data == {"first": {"ms": 1}}, "half a line is none"
    assert told == [{"first": {"ms": 1}}], "it was told before the end"
    assert outcome.error.startswith("not done")


def test_a_way_that_fails_or_hangs_does_not_cost_the_others(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(_: Any) -> dict[str, Any]:
        until(lambda: False, "nothing")
        return {}

    def crashes(_: Any) -> dict[str, Any]:
        return {"ms": {}[1]}

    monkeypatch.setattr(gpu_ways, "_LEAST", 0.1)
    begun = time.monotonic()
    found = run_ways(2.0, {"hangs": hangs, "crashes": crashes, "right": lambda _: {"ms": 1.0}}, {})
    assert 0.5 < time.monotonic() - begun < 2.0
    assert "TransferTimeout: waited" in found["hangs"]["error"]
    assert "KeyError" in found["crashes"]["error"]
    assert found["right"]["ms"] == 1.0
    assert [len(json.loads(line)) for line in capfd.readouterr().out.splitlines()] == [1, 2, 3], "each is told at once"
    assert failed({"share": found, "rows": [{"error": "x"}]}) == ["share/hangs", "share/crashes", "rows/0"]


def test_what_a_way_had_told_is_kept_when_it_is_cut(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(tell: Tell) -> dict[str, Any]:
        rows: list[int] = []
        for n in range(2):
            rows.append(n)
            tell({"rows": rows, "wrong": ["w"] * n})
        until(lambda: False, "the third")
        return {}

    monkeypatch.setattr(gpu_ways, "_LEAST", 0.1)
    found = run_ways(0.5, {"hangs": hangs}, {"before": 1})
    assert found["hangs"]["rows"] == [0, 1]
    assert "waited" in found["hangs"]["error"]
    assert not right(found), "what was found wrong stays found"
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["hangs"]["rows"] for line in lines] == [[0], [0, 1], [0, 1]], "told when it was known"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_refits_tell_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refit that fails in the middle of many costs none of those before."""
    refit, played = Play.refit, []

    def third_fails(play: Play) -> Any:
        played.append(play.version)
        if len(played) > 4:
            raise TransferTimeout("cut")
        return refit(play)

    monkeypatch.setattr(Play, "refit", third_fails)
    found = run_ways(60.0, {"model": lambda tell: gpu_model._refits(TINY, many_small(TINY), 7, tell)}, {})["model"]
    assert found["error"] == "TransferTimeout: cut"
    assert found["repeats"] == 2
    assert min(found["publish ms"], found["install ms"], found["cold install ms"]) > 0
    assert found["wrong"] == []


def test_wrong_bytes_anywhere_make_a_run_wrong() -> None:
    assert right({"a": {"wrong": []}, "b": [{"right": True}], "c": {"error": "it hung"}})
    assert not right({"a": {"b": [{"wrong": ["x"]}]}})
    assert not right({"rows": [{"right": False}]})


def test_figures_are_compared_within_one_run() -> None:
    found: dict[str, Any] = {
        "m2n": {"m2n call by call": {"net ms": 80.0}},
        "model": {
            "full list": {
                "install ms": 8.0,
                "install share of copy": 0.75,
                "publish share of copy": 0.5,
                "GB": 8.0,
                "everywhere ms": 20.0,
            }
        },
        "pulls": {"full list": {"kernel": {"share": 0.9}, "engine": {"error": "no"}}},
        "share": {"host arenas over gloo": {"rate of alone": 0.97}},
    }
    one = {row["what"]: (row["value"], row["kept"]) for row in figures(found, GpuSetup())}
    assert one["install, times as fast as nccl.m2n net of the barrier"] == (10.0, True)
    assert one["publish, of the device-to-device copy"] == (0.5, False)
    assert one["bare pulls, the fastest way, of the device-to-device copy"] == (0.9, True)
    two = {row["what"]: row["value"] for row in figures(found, GpuSetup(gpus=2))}
    assert two["install over NVLink, of the raw link"] == round(8.0 / 8e-3 / 478, 3)
    assert two["publish called to installed everywhere, times as fast as nccl.m2n"] == 4.0
    found["m2n"] |= {"gather and broadcast": {"whole model ms, scaled": 24.0}, "ratio of bytes": 4.0}
    gathered = {row["what"]: row for row in figures(found, GpuSetup(gpus=8))}[
        "install, times as fast as gather and broadcast"
    ]
    assert (gathered["value"], gathered["wanted"], gathered["kept"]) == (3.0, 4.0, False)


def test_models_are_cut_down_to_what_a_device_holds() -> None:
    whole, told = model_layouts(GpuSetup("Qwen3-4B", total=139 << 30))
    assert told["layers"] == told["of layers"] == 36
    assert (told["source"], told["destination"]) == ("fsdp2", "tp2")
    less, told = model_layouts(GpuSetup("Qwen3-30B-A3B", gpus=2, total=139 << 30))
    assert 0 < told["layers"] < told["of layers"]
    assert 5 * less.nbytes < 139 << 30
    less, told = model_layouts(GpuSetup("Qwen3-30B-A3B", gpus=1, total=139 << 30))
    assert 8 * less.nbytes < 139 << 30, (
        "three copies of trainers, one of engines, and two of each that are compared with"
    )
    assert layers_of(told) == f"{told['layers']} of 48 layers of Qwen3-30B-A3B"
    _, told = model_layouts(GpuSetup("Qwen3-30B-A3B", gpus=8, total=139 << 30))
    assert (told["source"], told["destination"], told["layers"]) == ("ep4", "tp4", 48)
    assert whole.source.keys() == whole.together.keys()
    small = many_small(GpuSetup())
    assert max(t.nbytes for t in small.destination.values()) <= 64 << 10


def test_without_a_gpu_it_says_how_to_try_it() -> None:
    if torch.cuda.is_available():
        assert setup_here("tiny", "cuda", 60, 1.0).gpus >= 1
    else:
        with pytest.raises(LayoutError, match="pretend"):
            setup_here("tiny", "cuda", 60, 1.0)
    with pytest.raises(CatalogError):
        setup_here("no such model", "pretend", 60, 1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("section", "gpus"),
    [("limits", 0), ("model", 0), ("share", 0), ("domains", 0), ("recover", 0), ("recover", 2), ("survive", 0)],
)
def test_every_section_runs_on_pretended_devices(section: str, gpus: int) -> None:
    found = measure_gpu(GpuSetup("tiny", "pretend", gpus, scale=0.01, seconds=200), lambda _: None, [section])
    assert not failed(found), failed(found)
    assert "ended by force" not in found[section]
    assert found["right"]
