"""Verification: digests of what was sent against digests of what arrived, leg by leg, sampled or full."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from elastic_reshard.arena import raw
from elastic_reshard.collective.agree import exchange
from elastic_reshard.errors import DigestMismatch
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.plan import Kind, Slice, boxes_of_range
from elastic_reshard.transport import Endpoint, Views

__all__ = ["Verification"]

# Of the legs, one in this many is looked at, others at each call; of a long leg one window.
_ONE_IN = 64
_WINDOW = 64 << 10
_TAG = 17


class Verification:
    """Prepared once per program. Both ends of a pair look at the same legs, in the same order."""

    def __init__(self, s: Slice, views: Views, *, full: bool, cast: bool = False) -> None:
        self.slice, self.views, self.full, self.cast = s, views, full, cast
        legs = s.legs
        keys = (legs.last, legs.first, legs.ordinal, legs.region, legs.tensor, legs.kind)
        rows = np.lexsort(keys) if len(legs) else np.zeros(0, dtype=np.int64)
        self.rows = rows[((legs.kind != Kind.SELF) & ~legs.install)[rows]]
        self.mixed = _mixed(legs.tensor, legs.region, legs.ordinal, legs.first)
        self.out: dict[int, npt.NDArray[np.int64]] = {}
        self.into: dict[int, npt.NDArray[np.int64]] = {}
        self.nbytes = 0

    def _choose(self, call: int) -> None:
        """The legs of this call: both ends of each know its number."""
        legs = self.slice.legs
        rows = self.rows if self.full else self.rows[(self.mixed[self.rows] + np.uint64(call)) % _ONE_IN == 0]
        peers = np.unique(legs.peer[rows]).tolist()
        self.out = {m: rows[(legs.peer[rows] == m) & legs.out[rows]] for m in peers}
        self.into = {m: rows[(legs.peer[rows] == m) & ~legs.out[rows]] for m in peers}

    def run(self, endpoint: Endpoint, call: int, deadline: float) -> int:
        """Compare. Collective, one verdict on all members; returns the bytes that this member looked at as a receiver.

        DigestMismatch where bytes differ; on members whose own are right it says who else's are not."""
        self.nbytes = 0
        self._choose(call)
        said = {m: self._digests(rows, out=True) for m, rows in self.out.items() if len(rows)}
        told: dict[int, npt.NDArray[np.uint64]] = {}
        near = set(endpoint.domain_peers)
        pending = []
        for m, rows in self.into.items():
            if len(rows) and m not in near:
                told[m] = np.empty(len(rows), dtype=np.uint64)
                pending.append(endpoint.network.receive(m, torch.from_numpy(told[m].view(np.uint8))))
        for m, digests in said.items():
            if m in near:
                endpoint.channel.send(m, _TAG, digests.tobytes(), deadline=deadline)
            else:
                pending.append(endpoint.network.send(m, torch.from_numpy(digests.view(np.uint8))))
        for m, rows in self.into.items():
            if len(rows) and m in near:
                payload = endpoint.channel.take(m, _TAG, deadline=deadline, strict=False).payload
                told[m] = np.frombuffer(payload, dtype=np.uint64)
        for one in pending:
            one.wait(deadline)
        wrong: list[tuple[str, str, int]] = []
        for m, rows in self.into.items():
            if len(rows):
                mine = self._digests(rows, out=False)
                wrong += [(*self._named(int(i)), m) for i in rows[mine != told[m]]]
        verdicts = exchange(endpoint, bytes([bool(wrong)]), [1] * endpoint.size, deadline)
        if wrong:
            raise DigestMismatch(wrong)
        others = [m for m, v in enumerate(verdicts) if v != b"\0"]
        if others:
            raise DigestMismatch([("(other members' tensors)", f"at member {m}", m) for m in others])
        return self.nbytes

    def _digests(self, rows: npt.NDArray[np.int64], *, out: bool) -> npt.NDArray[np.uint64]:
        found = np.empty(len(rows), dtype=np.uint64)
        for n, i in enumerate(rows.tolist()):
            data = self._bytes(i, out=out)
            self.nbytes += 0 if out else len(data)
            found[n] = xxhash.xxh3_64_intdigest(data.data)
        return found

    def _bytes(self, i: int, *, out: bool) -> npt.NDArray[np.uint8]:
        """The leg's window as it travelled, in one piece."""
        legs = self.slice.legs
        ref = self.slice.tensors[int(legs.tensor[i])]
        item = itemsize(ref.dtype)
        first, last = int(legs.first[i]), int(legs.last[i])
        if not self.full and (last - first) * item > _WINDOW:
            begin = int(_mixed(legs.region[i : i + 1], legs.ordinal[i : i + 1], legs.first[i : i + 1])[0])
            first += begin % (last - first - _WINDOW // item + 1)
            last = first + _WINDOW // item
        extent = legs.extent[i, : ref.dims].tolist()
        origin = (legs.source_at if out else legs.target_at)[i, : ref.dims].tolist()
        whole = self._memory(i, out=out)
        parts = []
        for at, size in boxes_of_range(extent, first, last):
            index = (..., *(slice(o + a, o + a + n) for o, a, n in zip(origin, at, size, strict=True)))
            parts.append(np.ascontiguousarray(whole[index]).reshape(-1).view(np.uint8))
        data: npt.NDArray[np.uint8] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return _one_nan(data, ref.dtype) if self.cast else data

    def _memory(self, i: int, *, out: bool) -> Any:
        legs = self.slice.legs
        ref = self.slice.tensors[int(legs.tensor[i])]
        way = int(legs.way[i])
        if not out or way < 0:
            return raw(self.views.tensor(("d", ref.target, ref.name)))
        party, c = ref.ways[way]
        tensor = self.views.tensor(("s", party, c.source))
        tensor = tensor.permute(c.permute) if c.permute is not None else tensor
        wire: torch.dtype = getattr(torch, ref.dtype)
        if tensor.dtype == wire:
            return raw(tensor)
        return _Cast(tensor, wire)

    def _named(self, i: int) -> tuple[str, str]:
        legs = self.slice.legs
        ref = self.slice.tensors[int(legs.tensor[i])]
        lo, extent = legs.lo[i, : ref.dims].tolist(), legs.extent[i, : ref.dims].tolist()
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(lo, extent, strict=True))
        return ref.name, f"[{box}] elements {int(legs.first[i])}:{int(legs.last[i])}"


# Of float dtypes whose casts run in vectors: all bits but the sign, and those of infinity.
_MAGNITUDE = {
    "bfloat16": (0x7FFF, 0x7F80),
    "float16": (0x7FFF, 0x7C00),
    "float32": (0x7FFFFFFF, 0x7F800000),
    "float64": (0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}


def _one_nan(data: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.uint8]:
    """With all NaNs alike: which one a cast makes depends on its place in torch's vectors (measured)."""
    if dtype not in _MAGNITUDE:
        return data
    magnitude, infinity = _MAGNITUDE[dtype]
    bits = data.view(f"i{itemsize(dtype)}")
    nan = (bits & bits.dtype.type(magnitude)) > infinity
    return np.where(nan, bits.dtype.type(magnitude), bits).view(np.uint8) if nan.any() else data


class _Cast:
    """A source tensor as it travels: cast where it is indexed, not as a whole."""

    def __init__(self, tensor: torch.Tensor, wire: torch.dtype) -> None:
        self.tensor, self.wire = tensor, wire

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        return np.asarray(raw(self.tensor[index].to(self.wire).contiguous()))


def _mixed(*columns: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Well-mixed 64-bit numbers from integer columns (splitmix64's finalizer, Steele et al. 2014)."""
    x = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        x = (x + column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(0xFFFFFFFFFFFFFFFF)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x
