"""What cannot be served is refused before anything moves, by all members at once, and the group goes on afterwards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from elastic_reshard.collective import reshard
from elastic_reshard.collective.reshard import _State
from elastic_reshard.errors import (
    ArenaError,
    LayoutError,
    LayoutMismatch,
    PeerRefused,
    PlanError,
    PlanMismatch,
    ReshardError,
)
from elastic_reshard.layout import Box, Correspondence, Mesh, ModelLayout, TensorLayout
from elastic_reshard.transport import Endpoint
from tests.collective import worlds
from tests.collective.worlds import S0, S1, Case, R
from tests.processes import Rank, run_ranks

DOMAINS = [0, 0, 1, 2]
SOURCES, DESTINATIONS = Mesh.arange((2,)), Mesh.arange((2,), first=2)


def model(mesh: Mesh, *, shape: tuple[int, ...] = (6, 4), dtype: str = "float32", more: str = "c") -> ModelLayout:
    return ModelLayout(
        {
            "a": TensorLayout(shape, "float32", mesh, (S0,)),
            "b": TensorLayout((8, 3), dtype, mesh, (S1 if mesh is DESTINATIONS else S0,)),
            more: TensorLayout((), "int64", mesh, (R,)),
        }
    )


CASE = Case(model(SOURCES), model(DESTINATIONS))


class Party:
    """One member, its tensors, and calls that are to be refused."""

    def __init__(self, me: Rank, endpoint: Endpoint) -> None:
        self.rank, self.endpoint = me.rank, endpoint
        self.source, self.destination = (
            worlds.tensors(side, me.rank, "ordinary") for side in (CASE.source, CASE.destination)
        )
        self.version = 0

    def refused(self, **more: Any) -> ReshardError | None:
        """The error of a call in which some arguments are others; destination tensors must stay as they are."""
        worlds.poison(self.destination)
        before = {n: t.clone() for n, t in (self.destination or {}).items()}
        arguments = {
            "source": self.source,
            "destination": self.destination,
            "source_layout": CASE.source if self.source else None,
            "destination_layout": CASE.destination if self.destination else None,
            "deadline": 20.0,
        }
        begun = time.monotonic()
        error = worlds.error_of(lambda: reshard(**arguments | more, group=self.endpoint))
        assert time.monotonic() - begun < 10.0
        assert not self.endpoint.closed
        assert all(worlds.as_bytes(t) == worlds.as_bytes(before[n]) for n, t in (self.destination or {}).items())
        return error

    def works(self) -> None:
        """The same endpoint serves the next call."""
        self.version += 1
        worlds.fill(CASE, self.source, self.rank, self.version)
        worlds.call(CASE, self.endpoint, self.source, self.destination, verify="full")
        assert worlds.wrong(CASE, self.destination, self.rank, self.version) == []


def mine(party: Party, **of_rank: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of r<rank>."""
    return dict(of_rank.get(f"r{party.rank}", {}))


def other_destination(party: Party, layout: ModelLayout) -> ReshardError | None:
    """Destinations come with another layout and tensors that fit it."""
    tensors = worlds.tensors(layout, party.rank, "ordinary")
    return party.refused(destination=tensors, destination_layout=layout if tensors else None)


def two_wrong_shapes(party: Party) -> ReshardError | None:
    wide = model(DESTINATIONS, shape=(6, 5), dtype="bfloat16", more="d")
    return other_destination(party, wide)


def one_wrong_local_shape(party: Party) -> ReshardError | None:
    assert party.destination is not None or party.rank != 2
    return party.refused(
        **mine(party, r2={"destination": {**(party.destination or {}), "a": torch.zeros(4, 4), "x": torch.zeros(1)}})
    )


def unlike_options(party: Party) -> ReshardError | None:
    return party.refused(**mine(party, r1={"message": 2 << 20}))


def unlike_verification(party: Party) -> ReshardError | None:
    return party.refused(**mine(party, r3={"verify": "full"}))


def unlike_layouts(party: Party) -> ReshardError | None:
    """Both destinations are given layouts that fit their tensors, but other ones."""
    turned = ModelLayout({**CASE.destination, "a": replace(CASE.destination["a"], mesh=Mesh.of([3, 2]))})
    return party.refused(**mine(party, r3={"destination_layout": turned}))


def a_value_that_is_none(party: Party) -> ReshardError | None:
    return party.refused(**mine(party, r0={"verify": "sometimes"}))


def too_little_staging(party: Party) -> ReshardError | None:
    return party.refused(**mine(party, r1={"staging": 1 << 20}))


def too_little_staging_everywhere(party: Party) -> ReshardError | None:
    return party.refused(staging=1 << 20)


def a_dtype_without_bytes(party: Party) -> ReshardError | None:
    return party.refused(**mine(party, r2={"wire_dtype": torch.qint8}))


def integers_are_not_cast(party: Party) -> ReshardError | None:
    return party.refused(wire_dtype={"c": torch.bfloat16})


def shared_memory(party: Party) -> ReshardError | None:
    """A member of both sides whose destination lies in its source's memory."""
    both = Case(model(SOURCES), model(SOURCES))
    source = worlds.tensors(both.source, party.rank, "ordinary")
    destination = worlds.tensors(both.destination, party.rank, "ordinary")
    if party.rank == 0:
        assert source is not None
        assert destination is not None
        destination["a"] = source["a"].view(-1)[:].view(3, 4)
    kept = {n: t.clone() for n, t in (source or {}).items()}
    error = party.refused(
        source=source, destination=destination, source_layout=both.source, destination_layout=both.destination
    )
    assert all(
        torch.equal(t.view(torch.uint8), kept[n].view(torch.uint8)) for n, t in (source or {}).items() if t.dim()
    )
    return error


def destinations_that_overlap(party: Party) -> ReshardError | None:
    if party.rank == 3:
        flat = torch.zeros(40)
        given = {
            **(party.destination or {}),
            "a": flat[:12].view(3, 4),
            "b": flat[11:27].as_strided((8, 2), (2, 1), 11),
        }
        given["b"] = given["b"][:, :1]
        assert tuple(given["b"].shape) == (8, 1)
        return party.refused(destination=given)
    return party.refused()


def a_destination_over_itself(party: Party) -> ReshardError | None:
    """An expanded tensor has one memory for several elements."""
    if party.rank == 2:
        return party.refused(destination={**(party.destination or {}), "a": torch.zeros(4).expand(3, 4)})
    return party.refused()


def a_hole(party: Party) -> ReshardError | None:
    """Sources declare 5 of 6 rows."""
    declared = TensorLayout.declare((6, 4), "float32", {0: Box((0, 0), (3, 4)), 1: Box((4, 0), (6, 4))})
    layout = ModelLayout({**CASE.source, "a": declared})
    source = worlds.tensors(layout, party.rank, "ordinary")
    return party.refused(source=source, source_layout=layout if source else None)


def a_missing_tensor(party: Party) -> ReshardError | None:
    kept = {n: t for n, t in (party.source or {}).items() if n != "a"}
    return party.refused(**mine(party, r1={"source": kept}))


def correspondences_that_leave_something(party: Party) -> ReshardError | None:
    return party.refused(correspondences=[Correspondence("a", "a"), Correspondence("b", "b", Box((0, 0), (7, 3)))])


def a_lazy_conjugate(party: Party) -> ReshardError | None:
    """Its memory does not hold its values."""
    given = {n: TensorLayout((4,), "complex64", m, (R,)) for n, m in (("s", Mesh.of([0])), ("d", Mesh.of([2])))}
    return party.refused(
        source={"w": torch.ones(4, dtype=torch.complex64).conj()} if party.rank == 0 else None,
        destination={"w": torch.zeros(4, dtype=torch.complex64)} if party.rank == 2 else None,
        source_layout=ModelLayout({"w": given["s"]}) if party.rank == 0 else None,
        destination_layout=ModelLayout({"w": given["d"]}) if party.rank == 2 else None,
    )


REFUSED = {
    f.__name__: f
    for f in (
        two_wrong_shapes, one_wrong_local_shape, unlike_options, unlike_verification, unlike_layouts,
        a_value_that_is_none, too_little_staging, too_little_staging_everywhere, a_dtype_without_bytes,
        integers_are_not_cast, shared_memory, destinations_that_overlap, a_destination_over_itself, a_hole,
        a_missing_tensor, correspondences_that_leave_something, a_lazy_conjugate,
    )
}  # fmt: skip


def refuse_all(me: Rank) -> dict[str, tuple[str, str, int | None]]:
    found = {}
    with worlds.form(me, DOMAINS) as endpoint:
        party = Party(me, endpoint)
        party.works()
        for name, refuse in REFUSED.items():
            error = refuse(party)
            found[name] = (type(error).__name__, str(error), getattr(error, "member", None))
            party.works()
    return found


def test_every_refusal_is_one_for_all_and_harms_nothing() -> None:
    results = run_ranks(refuse_all, 4, group=False)

    def alike(name: str, kind: type[ReshardError], *said: str) -> None:
        for r in results:
            assert r[name][0] == kind.__name__, (name, r[name])
            assert all(text in r[name][1] for text in said), (name, r[name])

    def by_one(name: str, rank: int, kind: type[ReshardError], *said: str) -> None:
        """One member's own reason; the others hear whose it is, and its words."""
        for m, r in enumerate(results):
            assert r[name][0] == (kind if m == rank else PeerRefused).__name__, (name, m, r[name])
            assert m == rank or r[name][2] == rank, (name, m, r[name])
        assert all(text in results[rank][name][1] for text in said), (name, results[rank][name])
        first = results[rank][name][1][:60]
        assert all(first in r[name][1] for r in results), name

    # Every violation at once, on every member.
    alike("two_wrong_shapes", LayoutMismatch, "a: shape", "b: dtype", "c: extra", "d: missing")
    by_one("one_wrong_local_shape", 2, LayoutMismatch, "a: shape: rank 2 has (4, 4)", "x: extra")
    alike("unlike_options", PlanMismatch, "other options")
    assert [r["unlike_options"][1].split("]")[0] for r in results] == [
        "members [1", "members [0, 2, 3", "members [1", "members [1"
    ]  # fmt: skip
    alike("unlike_verification", PlanMismatch, "other options")
    alike("unlike_layouts", LayoutMismatch, "ranks 2 and 3", "destination")
    by_one("a_value_that_is_none", 0, PlanError, "verify")
    by_one("too_little_staging", 1, PlanError, "staging")
    alike("too_little_staging_everywhere", PlanError, "staging (1048576) must be at least 4 messages")
    by_one("a_dtype_without_bytes", 2, LayoutError, "unknown dtype 'qint8'")
    alike("integers_are_not_cast", LayoutMismatch, "c: dtype: int64 is never cast")
    by_one("shared_memory", 0, ArenaError, "a and a share memory")
    by_one("destinations_that_overlap", 3, ArenaError, "a and b share memory")
    by_one("a_destination_over_itself", 2, ArenaError, "a", "memory")
    alike("a_hole", LayoutMismatch, "a: hole: 4 of 24")
    by_one("a_missing_tensor", 1, LayoutMismatch, "a: missing: rank 1")
    alike("correspondences_that_leave_something", LayoutMismatch, "b: shape", "c: missing")
    by_one("a_lazy_conjugate", 0, ArenaError, "resolve_conj")


def out_of_step(me: Rank) -> list[str]:
    """One member has made a call that the others have not (CASES B47)."""
    with worlds.form(me, DOMAINS) as endpoint:
        party = Party(me, endpoint)
        party.works()
        if me.rank == 1:
            endpoint.memo.setdefault("reshard", _State()).calls = 5
        error = party.refused()
        return [type(error).__name__, str(error)]


def test_members_in_unlike_calls_are_told_so() -> None:
    for kind, said in run_ranks(out_of_step, 4, group=False):
        assert kind == PlanMismatch.__name__
        assert "call" in said


def whole_on_the_gpu(me: Rank) -> str:
    with worlds.form(me, [0]) as endpoint:
        tensor = {"w": torch.zeros(3, device="meta")}
        return str(worlds.error_of(lambda: reshard(tensor, {"w": torch.zeros(3)}, group=endpoint, deadline=5.0)))


def test_a_tensor_elsewhere_is_named() -> None:
    assert run_ranks(whole_on_the_gpu, 1, group=False)[0].startswith("w is on meta")
