"""Random layouts, topologies and refits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from elastic_reshard.layout import (
    Box,
    Correspondence,
    Declared,
    Mesh,
    ModelLayout,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
)
from elastic_reshard.plan import Destination, Plan, PlanOptions, Source, Topology

_Test = TypeVar("_Test", bound=Callable[..., Any])

DTYPES = ("bool", "bfloat16", "float32", "int64", "complex128")


def examples(count: int) -> Callable[[_Test], _Test]:
    """So many examples, the same in every run, without a deadline for each; a failure prints how to repeat it."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Placement, ...]:
    """One for each mesh axis, of every kind."""
    found: list[Placement] = []
    for size in axes:
        kind = draw(st.sampled_from(["replicate", "shard", "shard", "strided", "declared"] if shape else ["replicate"]))
        if kind == "replicate":
            found.append(Replicate())
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        if kind == "strided":
            found.append(StridedShard(dim, draw(st.integers(1, 3))))
        elif kind == "declared" and not any(getattr(p, "dim", None) == dim for p in found):
            cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=size - 1, max_size=size - 1)))
            found.append(Declared(dim, (0, *cuts, shape[dim])))
        else:
            taken = {p.dim for p in found if isinstance(p, Declared)}
            found.append(Shard(dim) if dim not in taken else Replicate())
    return tuple(found)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], dtype: str, ranks: int) -> TensorLayout:
    """A tensor over some of the ranks, in any order, on a mesh of one to three axes."""
    used = draw(st.permutations(range(ranks)))[: draw(st.integers(1, ranks))]
    axes, left = [], len(used)
    for _ in range(draw(st.integers(0, 2))):
        axes.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= axes[-1]
    axes.append(left)
    chosen = draw(placements(shape, tuple(axes)))
    cut = [p.dim for p in chosen if isinstance(p, Shard | StridedShard | Declared)]
    declared = [p.dim for p in chosen if isinstance(p, Declared)]
    if any(cut.count(d) > 1 for d in declared):
        chosen = tuple(Replicate() if isinstance(p, Declared) else p for p in chosen)
    return TensorLayout(shape, dtype, Mesh.of(np.array(used).reshape(axes)), chosen)


@st.composite
def correspondences(draw: st.DrawFn, name: str, shape: tuple[int, ...]) -> tuple[list[Correspondence], dict[str, Any]]:
    """How a destination tensor is made: whole, with dims permuted, or of two source tensors along one dim. The second
    part is the source tensors' shapes."""
    permute = tuple(draw(st.permutations(range(len(shape)))))

    def back(box_shape: tuple[int, ...]) -> tuple[int, ...]:
        found = [0] * len(shape)
        for d, p in enumerate(permute):
            found[p] = box_shape[d]
        return tuple(found)

    wide = [d for d, n in enumerate(shape) if n > 1]
    if not wide or draw(st.booleans()):
        return [Correspondence(name, name, permute=permute)], {name: back(shape)}
    d = draw(st.sampled_from(wide))
    cut = draw(st.integers(1, shape[d] - 1))
    found, shapes = [], {}
    for part, (a, b) in enumerate([(0, cut), (cut, shape[d])]):
        lo = tuple(a if i == d else 0 for i in range(len(shape)))
        hi = tuple(b if i == d else n for i, n in enumerate(shape))
        box = Box(lo, hi)
        pad = draw(st.integers(0, 2))  # the part is a box inside of a larger source tensor
        inner = back(box.shape)
        found.append(
            Correspondence(
                f"{name}.{part}", name, Box((pad,) * len(shape), tuple(n + pad for n in inner)), box, permute
            )
        )
        shapes[f"{name}.{part}"] = tuple(n + 2 * pad for n in inner)
    return found, shapes


@st.composite
def topologies(draw: st.DrawFn, members: int) -> Topology:
    """Members in one to `members` domains, any of them anywhere."""
    labels = draw(st.integers(1, members))
    return Topology.of([draw(st.integers(0, labels - 1)) for _ in range(members)])


@st.composite
def options(draw: st.DrawFn, *, landing: bool) -> PlanOptions:
    """Small messages, cells and stripes, so that small tensors are cut. Cells are never cut, so staging must hold some
    dozens of them for a bound to mean anything: 64, as by default."""
    message = draw(st.sampled_from([32, 64, 256]))
    staging = message * draw(st.sampled_from([64, 1024] if landing else [16, 64, 1024]))
    return PlanOptions(
        message=message,
        staging=staging,
        min_stripe=draw(st.sampled_from([16, 64])),
        cell=draw(st.sampled_from([n for n in (16, 64, 256) if n <= staging // 64])) if landing else 256,
        landing=landing,
    )


_EXTENTS = st.sampled_from([0, 1, 2, 3, 5, 8, 13, 17])


@st.composite
def refits(draw: st.DrawFn, *, landing: bool = False, most: int = 5) -> Plan:
    """A plan between two groups, members of each in any order, apart or colocated, some tensors alike."""
    sources, destinations = draw(st.integers(1, most)), draw(st.integers(1, most))
    together = draw(st.booleans())
    members = max(sources, destinations) if together else sources + destinations
    order = draw(st.permutations(range(members)))
    have: dict[str, TensorLayout] = {}
    want: dict[str, TensorLayout] = {}
    ways: list[Correspondence] = []
    for t in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(_EXTENTS, max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        parts, shapes = draw(correspondences(f"t{t}", shape))
        kept = {name: draw(layouts(inner, dtype, sources)) for name, inner in shapes.items()}
        wanted = draw(layouts(shape, dtype, destinations))
        for layer in range(draw(st.integers(1, 3))):
            have |= {f"{layer}.{name}": layout for name, layout in kept.items()}
            want[f"{layer}.t{t}"] = wanted
            ways += [
                Correspondence(
                    f"{layer}.{c.source}", f"{layer}.{c.destination}", c.source_box, c.destination_box, c.permute
                )
                for c in parts
            ]
    return Plan(
        (Source(ModelLayout(have), tuple(order[:sources]), tuple(ways)),),
        (Destination(ModelLayout(want), tuple(order[members - destinations :])),),
        draw(topologies(members)),
        draw(options(landing=landing)),
    )
