"""Installing out of landing slots, against brute force: what landed, what the host's own sources have, and what nobody has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.arena.copies import raw
from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.landing import LandingArena, LandingReader
from elastic_reshard.errors import ArenaError, ShardLost
from elastic_reshard.layout import ModelLayout
from elastic_reshard.member.landed import Landed
from elastic_reshard.member.puller import Origin, Prepared, Puller, Request
from elastic_reshard.plan import Plan
from tests.member.landing import CELL, LandingRank, cells_of, there
from tests.member.test_puller import CASES, M2, S0, S1, Items, R, Taking, live_of, model, same
from tests.member.world import Array, SourceRank, expected, ranks_of, whole_of
from tests.plan.strategies import examples, refits

PUB = "pub-1"


class Host:
    """Destination ranks of one layout on one host, and the source ranks that are there too."""

    def __init__(self, source: ModelLayout, destination: ModelLayout, ways: Any, present: list[int]) -> None:
        self.source, self.destination, self.ways, self.present = source, destination, ways, present
        self.ranks = {rank: SourceRank(source, rank) for rank in present}
        self.cells = cells_of(destination)
        near = there(source, destination, ways, present)
        self.near = [bool(near[name].ravel()[elements].all()) for name, elements in self.cells]
        self.seats: list[LandingRank] = []

    def seat(self, rank: int, member: str) -> LandingRank:
        self.seats.append(LandingRank(self.destination, rank, member))
        return self.seats[-1]

    def wholes(self, version: int) -> dict[str, Array]:
        return whole_of(self.source, self.destination, self.ways, version)

    def request(self, version: int, slot: int = 0, publication: str = PUB) -> Request:
        origins = {rank: s.publish(version, slot) for rank, s in self.ranks.items()}
        looked = [seat.look(publication, slot) for seat in self.seats]
        landed = tuple(found for found in looked if found is not None)
        return Request(self.source, self.destination, origins, self.ways, landed)

    def install(self, rank: int, version: int, request: Request) -> None:
        """In place and by a function; every byte is compared."""
        want = expected(self.destination, self.wholes(version), rank)
        live, taking = live_of(self.destination, rank), Taking()
        for puller in (
            Puller(rank, tensors=live, given=self.destination),
            Puller(rank, install=taking, given=self.destination),
        ):
            prepared = puller.check(request)
            assert not prepared.changed()
            assert not prepared.lapsed()
            assert prepared.run() == prepared.nbytes == sum(w.nbytes for w in want.values())
            assert not prepared.changed()
            assert not prepared.lapsed()
        assert same({n: raw(t) for n, t in live.items()}, want), rank
        assert same(taking.got, want), rank

    def close(self) -> None:
        for seat in self.seats:
            seat.close()


@examples(60)
@given(refits(most=4), st.data())
def test_any_layouts_any_cells_landed_any_sources_near(plan: Plan, data: st.DataObject) -> None:
    source, destination = plan.sources[0].layout, plan.destinations[0].layout
    present = data.draw(st.lists(st.sampled_from(ranks_of(source)), unique=True))
    host = Host(source, destination, plan.sources[0].correspondences, present)
    everyone = ranks_of(destination)
    here = data.draw(st.lists(st.sampled_from(everyone), min_size=1, max_size=5))  # twice: of another group
    seats = [host.seat(rank, f"m{n}") for n, rank in enumerate(here)]
    full = data.draw(st.booleans())
    held: set[int] = set()
    for seat in seats:
        some = [c for c in seat.own if data.draw(st.booleans())]
        held |= set(some)
        seat.land(PUB, host.wholes(1), some)
    if full:  # what nobody has yet lands with whoever is first
        for seat in seats:
            rest = [c for c in seat.own if c not in held and not host.near[c]]
            held |= set(rest)
            seat.land(PUB, host.wholes(1), rest)
    request = host.request(1)
    for rank in sorted(set(here)):
        own = next(seat.own for seat in seats if seat.rank == rank)
        lost = {host.cells[c][0] for c in own if c not in held and not host.near[c] and len(host.cells[c][1])}
        assert not (lost and full)
        if not lost:
            host.install(rank, 1, request)
            continue
        live = live_of(destination, rank)
        with pytest.raises(ShardLost) as caught:
            Puller(rank, tensors=live, given=destination).check(request)
        assert {name for name, _ in caught.value.lost} == lost
        assert not any(raw(t).any() for t in live.values())
    host.close()


@pytest.mark.parametrize("how", CASES)
@pytest.mark.parametrize("near", [False, True], ids=["none near", "some sources near"])
def test_the_usual_layouts_two_groups_share_what_landed(how: str, near: bool) -> None:
    have, want, ways, present = CASES[how]
    source, destination = ModelLayout(have), ModelLayout(want)
    host = Host(source, destination, ways, present[:1] if near else [])
    seats = [host.seat(rank, f"{group}-{rank}") for group in "ab" for rank in ranks_of(destination)]
    for version, slot in ((1, 0), (2, 1), (3, 0)):
        publication = f"pub-{version}"
        landed: dict[int, int] = {}
        for number, seat in enumerate(seats):  # one copy for both groups, spread over all
            for cell in seat.own:
                if not host.near[cell] and (cell not in landed or (cell + number) % 3 == 0):
                    landed[cell] = number
        for number, seat in enumerate(seats):
            seat.land(publication, host.wholes(version), [c for c, n in landed.items() if n == number], slot)
        request = host.request(version, slot, publication)
        for rank in ranks_of(destination):
            host.install(rank, version, request)
    host.close()


def tp2() -> tuple[Host, list[LandingRank]]:
    """A TP2 engine whose trainers are all elsewhere; every cell is with the rank that wants it."""
    source = ModelLayout({"w": model((16, 24), M2, S0), "b": model((40,), M2, R)})
    destination = ModelLayout({"w": model((16, 24), M2, S1), "b": model((40,), M2, R)})
    host = Host(source, destination, None, [])
    seats = [host.seat(rank, f"e-{rank}@0") for rank in range(2)]
    for seat in seats:
        seat.land(PUB, host.wholes(1), [c for c in seat.own if host.cells[c][0] == "w" or seat.rank == 0])
    return host, seats


@pytest.fixture
def engine() -> Iterator[tuple[Host, list[LandingRank]]]:
    host, seats = tp2()
    yield host, seats
    host.close()


def prepared_for(host: Host, rank: int, request: Request, install: Any = None) -> Prepared:
    if install is not None:
        return Puller(rank, install=install, given=host.destination).check(request)
    return Puller(rank, tensors=live_of(host.destination, rank), given=host.destination).check(request)


def test_a_slot_that_is_not_of_the_publication_has_nothing(engine: tuple[Host, list[LandingRank]]) -> None:
    host, seats = engine
    host.install(0, 1, host.request(1))
    assert seats[0].look("pub-2") is None
    assert seats[0].look(PUB, slot=1) is None
    seats[0].writers[0].begin("pub-2")
    assert seats[0].look(PUB) is None
    with pytest.raises(ShardLost, match="w"):
        prepared_for(host, 0, host.request(1))


def test_a_slot_reset_before_during_or_after_the_pull_shows(engine: tuple[Host, list[LandingRank]]) -> None:
    host, seats = engine
    request = host.request(1)
    early, late = prepared_for(host, 1, request), prepared_for(host, 1, request)
    assert (early.lapsed(), early.ranks) == ([], ())
    late.run()
    handed: list[str] = []

    def meddling(tensors: Items) -> None:
        for name, _ in tensors:
            handed.append(name)
            seats[1].writers[0]._word[0] |= 1  # a reset begins while rank 1's own slot is read

    during = prepared_for(host, 1, request, meddling)
    assert during.lapsed() == []
    during.run()
    assert handed == ["w", "b"]
    assert during.lapsed() == ["e-1@0"]
    assert early.lapsed() == late.lapsed() == ["e-1@0"]
    assert prepared_for(host, 0, request).lapsed() == []  # rank 0 reads nothing of it
    seats[1].writers[0]._word[0] += 1  # even again: it was reset, even if it is the same publication
    assert early.lapsed() == late.lapsed() == ["e-1@0"]
    seats[0].writers[0].begin("pub-2")
    assert late.lapsed() == ["e-0@0", "e-1@0"]  # rank 1's `b` lies with rank 0


def test_a_cell_that_is_taken_back_shows(engine: tuple[Host, list[LandingRank]]) -> None:
    host, seats = engine
    prepared = prepared_for(host, 0, host.request(1))
    prepared.run()
    seats[0].writers[0].clear(np.array([1]))
    assert prepared.lapsed() == ["e-0@0"]


def test_a_missing_cell_is_named_and_nothing_is_touched(engine: tuple[Host, list[LandingRank]]) -> None:
    host, seats = engine
    cell = next(n for n, c in enumerate(seats[0].own) if host.cells[c][0] == "b")
    seats[0].writers[0].clear(np.array([cell]))
    live = live_of(host.destination, 1)
    with pytest.raises(ShardLost) as caught:
        Puller(1, tensors=live, given=host.destination).check(host.request(1))
    assert [name for name, _ in caught.value.lost] == ["b"]
    assert not any(raw(t).any() for t in live.values())
    # Another's missing cells are its own matter.
    seats[0].land(PUB, host.wholes(1), [seats[0].own[cell]])
    seats[0].writers[0].clear(np.array([n for n, c in enumerate(seats[0].own) if host.cells[c][0] == "w"]))
    host.install(1, 1, host.request(1))


def test_a_former_incarnation_of_the_same_rank_still_serves(engine: tuple[Host, list[LandingRank]]) -> None:
    host, seats = engine
    request = host.request(1)
    again = host.seat(0, "e-0@1")
    again.land(PUB, host.wholes(1), [])
    request = host.request(1)
    assert len(request.landed) == 3
    host.install(0, 1, request)
    host.install(1, 1, request)
    assert seats[0].member != again.member


def test_programs_are_bound_once_for_slots_and_cells(engine: tuple[Host, list[LandingRank]]) -> None:
    host, seats = engine
    puller = Puller(0, tensors=(live := live_of(host.destination, 0)), given=host.destination)
    seen = []
    for version in range(1, 5):
        for seat in seats:
            wanted = [c for c in seat.own if host.cells[c][0] == "w" or seat.rank == 0]
            seat.land(f"pub-{version}", host.wholes(version), wanted, version % 2)
        prepared = puller.check(host.request(version, version % 2, f"pub-{version}"))
        prepared.run()
        seen.append(prepared._steps)
        assert prepared.lapsed() == []
        assert same({n: raw(t) for n, t in live.items()}, expected(host.destination, host.wholes(version), 0))
    assert seen[0] is seen[2]
    assert seen[1] is seen[3]
    assert len(puller._slices) == 1
    seats[1].land("pub-4", host.wholes(4), [c for c in seats[1].own if host.cells[c][0] == "b"], 0)
    assert puller.check(host.request(4, 0, "pub-4"))._steps is not seen[3]
    puller.forget(seats[0].reader)
    assert not puller._bound


def _with(seat: LandingRank, arena: LandingArena) -> Landed:
    reader = LandingReader(MappedArena(arena.readonly_fd()), arena.table(), arena.arena_id)
    held = np.ones(arena.cells, dtype=bool)
    return Landed(reader, 0, seat.rank, seat.member, PUB, 0, held)


def test_slots_of_other_layouts_are_refused(engine: tuple[Host, list[LandingRank]]) -> None:
    host, seats = engine
    request = host.request(1)
    specs: Mapping[str, Any] = seats[0].arena.specs
    for arena, why in (
        (LandingArena(specs, len(seats[0].own), CELL * 2, touch=False), "unlike cell sizes"),
        (LandingArena(specs, len(seats[0].own) + 1, CELL, touch=False), "counts"),
        (LandingArena({**specs, "w": ((8, 16), torch.bfloat16)}, len(seats[0].own), CELL, touch=False), "holds w as"),
    ):
        bad = Request(request.source, request.destination, {}, None, (_with(seats[0], arena), request.landed[1]))
        with pytest.raises(ArenaError, match=why):
            prepared_for(host, 0, bad)


def test_sources_that_are_near_are_read_and_their_generation_counts() -> None:
    source = ModelLayout({"w": model((16, 24), M2, S0)})
    destination = ModelLayout({"w": model((16, 24), M2, S1)})
    host = Host(source, destination, None, [0])
    seat = host.seat(0, "e-0@0")
    seat.land(PUB, host.wholes(1), [c for c in seat.own if not host.near[c]])
    request = host.request(1)
    assert 0 < int(request.landed[0].held.sum()) < len(seat.own)
    host.install(0, 1, request)
    prepared = prepared_for(host, 0, request)
    assert prepared.ranks == (0,)
    host.ranks[0].publish(2)
    assert prepared.changed() == [0]
    odd: dict[int, Origin] = {}
    with pytest.raises(ShardLost, match="w"):
        prepared_for(host, 0, Request(source, destination, odd, None, request.landed))
    host.close()
