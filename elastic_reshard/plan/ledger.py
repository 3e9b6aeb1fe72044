"""The ledger: which cells each holder has. One bit a cell, set after its bytes; a basis for the next plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from elastic_reshard.errors import PlanError

__all__ = ["Bits", "Ledger"]

Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Ledger:
    """cells[target] is the number of cells of each destination layout; held[(target, member)] one bool per cell."""

    cells: tuple[int, ...]
    held: Mapping[tuple[int, int], Bits]

    def __post_init__(self) -> None:
        for (target, member), bits in self.held.items():
            if not 0 <= target < len(self.cells) or bits.shape != (self.cells[target],) or bits.dtype != np.bool_:
                raise PlanError(f"ledger of member {member} for target {target} does not fit {self.cells} cells")

    @classmethod
    def empty(cls, cells: Iterable[int]) -> Ledger:
        """Nothing has landed."""
        return cls(tuple(cells), {})

    @classmethod
    def unpacked(cls, cells: Iterable[int], packed: Mapping[tuple[int, int], bytes]) -> Ledger:
        """From bitmaps as they travel (`packed`)."""
        counts = tuple(cells)
        held = {
            key: np.unpackbits(np.frombuffer(raw, dtype=np.uint8), count=counts[key[0]]).astype(np.bool_)
            for key, raw in packed.items()
        }
        return cls(counts, held)

    @cached_property
    def packed(self) -> dict[tuple[int, int], bytes]:
        """One bitmap per holder, most significant bit first."""
        return {key: np.packbits(bits).tobytes() for key, bits in sorted(self.held.items())}

    @cached_property
    def digest(self) -> str:
        """Content id; holders without a cell do not count."""
        h = xxhash.xxh3_128(repr(self.cells).encode())
        for key, raw in self.packed.items():
            if any(raw):
                h.update(repr(key).encode())
                h.update(raw)
        return h.hexdigest()

    def merged(self, other: Ledger) -> Ledger:
        """What either knows. A bit is only ever set after its bytes, so the union is true."""
        if self.cells != other.cells:
            raise PlanError(f"ledgers of different grids: {self.cells} and {other.cells} cells")
        held = dict(self.held)
        for key, bits in other.held.items():
            held[key] = held[key] | bits if key in held else bits
        return Ledger(self.cells, held)

    def without(self, members: Iterable[int]) -> Ledger:
        """Without those whose memory is gone."""
        gone = set(members)
        return Ledger(self.cells, {k: b for k, b in self.held.items() if k[1] not in gone})

    def held_by_any(self, target: int, absent: Iterable[int] = ()) -> Bits:
        """Cells that somebody present holds."""
        gone = set(absent)
        found = np.zeros(self.cells[target], dtype=bool)
        for (t, member), bits in self.held.items():
            if t == target and member not in gone:
                found |= bits
        return found

    @cached_property
    def _by_cell(self) -> tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], ...]:
        """(cell, member) of every bit set, sorted, per target."""
        found = []
        for target in range(len(self.cells)):
            held = [(np.flatnonzero(bits), member) for (t, member), bits in sorted(self.held.items()) if t == target]
            none = np.zeros(0, dtype=np.int64)
            cell = np.concatenate([none, *(at for at, _ in held)])
            member_ = np.concatenate([none, *(np.full(len(at), member, dtype=np.int64) for at, member in held)])
            order = np.argsort(cell, kind="stable")
            found.append((cell[order], member_[order]))
        return tuple(found)

    def holders(self, target: int, first: int, last: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(cell - first, member) of every bit set among cells first:last, sorted."""
        cell, member = self._by_cell[target]
        a, b = np.searchsorted(cell, [first, last])
        return cell[a:b] - first, member[a:b]
