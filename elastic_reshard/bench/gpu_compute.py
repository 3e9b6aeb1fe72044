"""A member that computes: large matrix products for the rate, steps of small ones for the latency."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Compute", "Rates"]

_LARGE = {"cuda": 8192, "cpu": 128}
_SMALL = {"cuda": 2048, "cpu": 32}
_STEP = 32  # small products in a step
_STEPS = 8  # steps between two large products


@dataclass
class Rates:
    """What was computed. gemms: seconds of each large product; steps: of each step; flop: of one large product."""

    flop: float = 0.0
    gemms: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    @property
    def tflops(self) -> float:
        """Of the large products."""
        spent = sum(self.gemms)
        return self.flop * len(self.gemms) / spent / 1e12 if spent else 0.0

    def to_data(self) -> dict[str, Any]:
        """JSON-ready: milliseconds."""
        steps = sorted(self.steps)
        if not steps:
            return {"tflops": 0.0, "steps": 0}
        return {
            "tflops": round(self.tflops, 1), "steps": len(steps), "step p50 ms": round(1e3 * statistics.median(steps), 3),
            "step p99 ms": round(1e3 * steps[min(len(steps) - 1, int(0.99 * len(steps)))], 3),
        }  # fmt: skip


class Compute:
    """Matrices on a device, and products of them. One thread; in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        if not self._cuda:
            torch.set_num_threads(1)
        dtype = torch.bfloat16 if self._cuda else torch.float32
        n, k = _LARGE[device.type], _SMALL[device.type]
        self.flop = 2.0 * n**3

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn((rows, columns), device=device).to(dtype)

        self._large = matrix(n, n), matrix(n, n), matrix(n, n)
        self._small = matrix(k, k // 4), matrix(k // 4, k), matrix(k, k)
        self.some(Rates())  # libraries load, clocks rise

    def _timed(self, times: int, matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
        a, b, out = matrices
        self._wait()
        begun = time.perf_counter()
        for _ in range(times):
            torch.mm(a, b, out=out)
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.current_stream(self._device).synchronize()  # it may not be the current device's

    def some(self, rates: Rates) -> None:
        """One large product and some steps, added to the rates."""
        rates.flop = self.flop
        rates.gemms.append(self._timed(1, self._large))
        for _ in range(_STEPS):
            rates.steps.append(self._timed(_STEP, self._small))

    def run(self, end: float) -> Rates:
        """Until `end` (time.monotonic)."""
        rates = Rates()
        while time.monotonic() < end:
            self.some(rates)
        return rates
