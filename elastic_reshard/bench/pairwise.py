"""A straightforward planner, as frameworks write it: every source rank against every destination rank, one Python object
per transfer. It knows no domains. Here for comparison (`bench plan`) and as an oracle on small cases."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_reshard.layout import Box, TensorLayout

__all__ = ["Piece", "pairwise"]


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Destination rank `destination` takes `box` from source rank `source`."""

    destination: int
    box: Box
    source: int


def pairwise(source: TensorLayout, destination: TensorLayout) -> list[Piece]:
    """All pieces of one tensor, each wanted element once: O(source ranks x destination ranks).

    Where replicas hold the same box, destination ranks take turns among them. The layouts have equal shapes; the ranks of
    each count from anything, the two sides are not the same processes.
    """
    have = [(rank, [box for box, _ in source.boxes(rank)]) for rank in source.mesh.ranks]
    found: list[Piece] = []
    for number, rank in enumerate(destination.mesh.ranks):
        for wanted, _ in destination.boxes(rank):
            by_box: dict[Box, list[int]] = {}
            for holder, held in have:
                for box in held:
                    common = wanted.intersect(box)
                    if common is not None:
                        by_box.setdefault(common, []).append(holder)
            found += [Piece(rank, box, holders[number % len(holders)]) for box, holders in by_box.items()]
    return found
