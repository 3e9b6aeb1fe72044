"""The measuring program of copies: every step comes to figures, and a copy that goes wrong is seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic_reshard.arena.device import Device
from elastic_reshard.arena.devices import open_device
from elastic_reshard.arena.pretend import PretendDevice
from elastic_reshard.bench import gpu_copies
from elastic_reshard.bench.gpu_copies import measure_copies
from elastic_reshard.errors import ArenaError


def _figures(found: Any) -> Iterator[Any]:
    if isinstance(found, dict):
        for value in found.values():
            yield from _figures(value)
    else:
        yield found


def _complete(device: Device, gib: float) -> None:
    found = measure_copies(device, gib)
    steps = {name: step for name, step in found.items() if isinstance(step, dict)}
    assert len(steps) == 7
    for name, step in steps.items():
        assert "error" not in step, (name, step)
    assert all(value > 0 for value in _figures(steps) if isinstance(value, float))


@pytest.mark.long
def test_every_step_comes_to_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_copies, "_ONE_TRY", 0.001)
    _complete(open_device("pretend", "pretend:0"), 0.125)


@pytest.mark.gpu
def test_every_step_comes_to_figures_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from elastic_reshard.arena.cuda import open_index

    _complete(open_index(0), 1.0)


def test_a_device_that_copies_wrong_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device("pretend", "pretend:0")
    bench = gpu_copies._Bench(device, 64 << 20)
    monkeypatch.setattr(PretendDevice, "copy", lambda *_: None)
    with pytest.raises(ArenaError, match="came out wrong"):
        bench.copies([(bench.target[0 : 1 << 20], bench.source[4 : (1 << 20) + 4])], "kernel")
