"""`Installer` where weights come from other hosts: which slots it reads, and how it ends when one is not what it was."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from elastic_reshard.arena.copies import raw
from elastic_reshard.arena.pretend import open_pretend
from elastic_reshard.errors import ArenaError, GroupBroken, NothingInstallable, RefitTimeout
from elastic_reshard.layout import ModelLayout
from elastic_reshard.member import installer
from elastic_reshard.member.installer import Installer
from elastic_reshard.member.puller import Prepared, Puller
from elastic_reshard.member.stage import Stage
from elastic_reshard.protocol.docs import (
    LandedDoc,
    LandingDoc,
    PublicationDoc,
    PublicationState,
    SourceDoc,
    TicketDoc,
    VerdictDoc,
)
from tests.member.desks import ME, Job
from tests.member.landing import CELL, LandingRank, there
from tests.member.test_lander import until
from tests.member.test_puller import M2, S0, R, model
from tests.member.world import Array, SourceRank, expected, whole_of

SOURCE = ModelLayout({"w": model((16, 24), M2, S0), "b": model((40,), M2, R)})
ONE = model((1,), M2, R).mesh.of([0], ("one",))
WANTED = ModelLayout({"w": model((16, 24), ONE, R), "b": model((40,), ONE, R)})


class Engine(Job):
    """An engine of one rank on host "h"; trainer 0 is there, trainer 1 on host "far"."""

    def __init__(self) -> None:
        super().__init__()
        self.remote.layouts |= {"S": SOURCE, "L1": WANTED}
        self.live = {n: torch.zeros(t.shape, dtype=torch.bfloat16) for n, t in WANTED.items()}
        puller = Puller(0, tensors=self.live, given=WANTED)
        self.installer = Installer(self.desk, puller, cast(Any, self.remote), CELL, 0.0, Stage("e", "auto"))
        self.trainers = [SourceRank(SOURCE, rank) for rank in range(2)]
        self.mine, self.other = (LandingRank(WANTED, 0, name) for name in (ME, "other@1"))
        for seat in (self.mine, self.other):
            self.link.arenas[seat.arena.arena_id] = (seat.arena.readonly_fd(), seat.arena.table())
        for rank, trainer in enumerate(self.trainers):
            self.link.arenas[f"t{rank}"] = (trainer.arena.readonly_fd(), trainer.arena.table())
        near = there(SOURCE, WANTED, None, [0])
        self.far = [c for c, (name, elements) in enumerate(self.mine.cells) if not near[name].ravel()[elements].all()]
        self.tickets = 0

    def wholes(self, version: int) -> dict[str, Array]:
        return whole_of(SOURCE, WANTED, None, version)

    def publish(self, version: int, hosts: tuple[str, str] = ("h", "far"), **more: Any) -> str:
        """A committed version whose far half has landed: even cells with this member, odd ones with another group's."""
        name, slot = f"p{version}", version % 2
        origins = [trainer.publish(version, slot) for trainer in self.trainers]
        for seat, odd in ((self.mine, 0), (self.other, 1)):
            seat.land(name, self.wholes(version), [c for c in self.far if c % 2 == odd], slot)
        landings = [
            LandingDoc(member=s.member, group="g", rank=0, host="h", layout="L1", arena=s.arena.arena_id, slot=slot)
            for s in (self.mine, self.other)
        ]
        # Neither are ours to read: of another host, and of another layout.
        landings += [landings[0].model_copy(update={"host": "far", "arena": "xx"}),
                     landings[0].model_copy(update={"layout": "L2", "arena": "yy"})]  # fmt: skip
        doc = PublicationDoc(
            id=name, weight_version=version, label=None, extras={}, group="t", seq=version, layout="S",
            state=PublicationState.COMMITTED, landings=tuple(landings),
            landed=(LandedDoc(host="h", layout="L1", ranks=(0,)),),
            sources=tuple(SourceDoc(member=f"t{r}", rank=r, host=hosts[r], arena=f"t{r}", slot=slot, generation=o.generation)
                          for r, o in enumerate(origins)),
        )  # fmt: skip
        self.tell(publications={name: doc.model_copy(update=more)}, committed=name)
        return name

    def install(self, version: int) -> Any:
        """One call, with the supervisor's part played here: a ticket for its ask, and a verdict by its report."""
        found: list[Any] = []

        def call() -> None:
            try:
                found.append(self.installer.install(20.0))
            except (GroupBroken, ArenaError) as error:
                found.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        self.tickets += 1
        until(lambda: self.core.install.asking or found)
        if not found:
            name, ask = f"k{self.tickets}", self.core.install.ask
            self.tell(group={"ticket": TicketDoc(id=name, publication=f"p{version}", weight_version=version,
                                                 attempt=1, asks={ME: ask}, within=9.0)})  # fmt: skip
            until(lambda: self.core.install.outcome in ("pulled", "failed") or found)
            good = self.core.install.outcome == "pulled"
            self.tell(group={"ticket": None, "verdict": VerdictDoc(
                ticket=name, verdict="current" if good else "partial", weight_version=version, publication=f"p{version}",
                asks={ME: ask}, reason=self.core.install.reason, members=(ME,),
            )})  # fmt: skip
        caller.join(10.0)
        assert not caller.is_alive()
        return found[0]

    def holds(self, version: int) -> bool:
        want = expected(WANTED, self.wholes(version), 0)
        return all(raw(self.live[n]).tobytes() == w.tobytes() for n, w in want.items())

    def close(self) -> None:
        self.installer.close()
        self.link.close()
        for seat in (self.mine, self.other):
            seat.close()
        for trainer in self.trainers:
            trainer.reader.close()
            trainer.arena.close()
        self.trainers.clear()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def test_near_sources_and_landed_cells_make_one_version(engine: Engine) -> None:
    for version in (1, 2, 3):
        engine.publish(version)
        assert engine.core.installable() is not None
        result = engine.install(version)
        assert (result["weight_version"], result["changed"]) == (version, True)
        assert result["nbytes"] == 2 * (16 * 24 + 40)
        assert engine.holds(version)
    assert set(engine.installer._readers) == {"t0"}  # what is far is not mapped, even if it could be
    assert set(engine.installer._landing) == {engine.mine.arena.arena_id, engine.other.arena.arena_id}
    assert 0 < len(engine.far) < len(engine.mine.own)
    assert engine.installer.rehearse()() == result["nbytes"]


def test_an_engine_on_a_device_maps_host_arenas_so_that_the_device_reaches_them(engine: Engine) -> None:
    puller = engine.installer._puller
    puller.device = device = open_pretend(0)
    reader = engine.installer._reader("t0", time.monotonic() + 10)
    memory = engine.installer._registered["t0"]
    assert device._hosts.keepers([(memory.address, memory.address + memory.nbytes)])
    assert not reader._arena.bytes.flags.writeable


@pytest.mark.parametrize(("fresh", "looks"), [(100.0, 1), (-1.0, 2)])
def test_tensors_are_looked_at_while_the_request_is_on_its_way_and_again_after_a_long_wait(
    engine: Engine, fresh: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "_FRESH", fresh)
    moved = {n: torch.zeros_like(t) for n, t in engine.live.items()}
    held, asked = [engine.live, engine.live, moved], []

    def tensors() -> dict[str, torch.Tensor]:
        asked.append(engine.core.install.ticket)
        return held[min(len(asked), 2)]

    engine.installer._puller = Puller(0, tensors=tensors, given=WANTED)
    engine.publish(1)
    assert engine.install(1)["changed"]
    assert asked == [None, "k1"][:looks]  # moved in between: it is the second look that counts
    engine.live = held[looks]
    assert engine.holds(1)


def test_a_look_is_let_go_of_when_it_is_old_and_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen:
        """A look, that can be watched."""

    def made(fresh: float) -> tuple[Any, weakref.ref[Seen]]:
        monkeypatch.setattr(installer, "_FRESH", fresh)
        look = Seen()
        return installer._Ahead(cast(Any, look)), weakref.ref(look)

    ahead, look = made(100.0)
    ahead.age()
    assert look() is not None
    assert ahead.take() is not None
    assert look() is None
    assert ahead.take() is None
    ahead, look = made(0.0)
    ahead.age()
    assert look() is None


def test_where_nothing_is_to_be_installed_the_tensors_are_not_asked_for(engine: Engine) -> None:
    asked: list[int] = []
    engine.installer._puller = Puller(0, tensors=lambda: asked.append(1) or engine.live, given=WANTED)  # type: ignore[func-returns-value]
    with pytest.raises(RefitTimeout):
        engine.installer.install(0.05)
    assert not asked


def test_tensors_that_cannot_be_had_break_the_install_of_the_group(engine: Engine) -> None:
    def gone() -> dict[str, torch.Tensor]:
        raise ArenaError("asleep")

    engine.installer._puller = Puller(0, tensors=gone, given=WANTED)
    engine.publish(1)
    assert "asleep" in str(engine.install(1))
    assert (engine.core.install.outcome, engine.core.install.reason) == ("failed", "ArenaError: asleep")


def test_with_all_sources_near_landing_slots_are_not_looked_at(engine: Engine) -> None:
    engine.publish(1, ("h", "h"))
    engine.mine.writers[1].begin("other")
    assert engine.install(1)["changed"]
    assert engine.holds(1)
    assert not engine.installer._landing


def test_arenas_that_nothing_refers_to_any_more_are_unmapped(engine: Engine) -> None:
    engine.publish(1)
    engine.install(1)
    engine.publish(2, ("h", "h"), landings=())
    engine.tell(publications={"p1": None})
    engine.install(2)
    assert not engine.installer._landing


def test_a_slot_that_was_reset_before_is_not_read_and_the_missing_tensors_are_named(engine: Engine) -> None:
    engine.publish(1)
    engine.other.writers[1].begin("p9")
    broken = engine.install(1)
    assert isinstance(broken, GroupBroken)
    assert "domain h" in str(broken)
    assert "w " in str(broken)
    assert not any(raw(t).any() for t in engine.live.values())
    engine.publish(2)
    assert engine.install(2)["changed"]
    assert engine.holds(2)


def test_a_source_slot_that_was_written_again_is_found_before_anything_is_touched(engine: Engine) -> None:
    engine.publish(1)
    engine.trainers[0].publish(2, slot=1)
    broken = engine.install(1)
    assert isinstance(broken, GroupBroken)
    assert "slots of source ranks [0] were written again" in str(broken)
    assert not any(raw(t).any() for t in engine.live.values())


def test_a_missing_cell_breaks_the_install_and_names_its_tensor(engine: Engine) -> None:
    engine.publish(1)
    engine.mine.writers[1].clear(np.array([engine.mine.own.index(next(c for c in engine.far if c % 2 == 0))]))
    broken = engine.install(1)
    assert isinstance(broken, GroupBroken)
    assert "no reachable member holds w " in str(broken)
    assert engine.core.install.outcome == "failed"
    assert not any(raw(t).any() for t in engine.live.values())


@pytest.mark.parametrize("how", ["before", "during", "after"])
def test_a_slot_that_is_reset_while_it_is_read_breaks_the_install(
    engine: Engine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.publish(1)
    writer = engine.other.writers[1]

    def meddle(name: str) -> None:
        # Looked at, then reset before the copy; half reset when it ends; or reset whole by then.
        if how == "before" and name == "member.install.pulling":
            writer.begin("p9")
        elif how == "during" and name == "member.install.pulling":
            writer._word[0] += 1
        elif how == "after" and name == "run":
            writer.begin("p9")

    monkeypatch.setattr("elastic_reshard.member.installer.hook", meddle)
    if how == "after":
        run = Prepared.run

        def then(self: Prepared) -> int:
            nbytes = run(self)
            meddle("run")
            return nbytes

        monkeypatch.setattr(Prepared, "run", then)
    broken = engine.install(1)
    assert isinstance(broken, GroupBroken)
    assert "landing slots of other@1 were reset" in str(broken)


def test_no_memory_to_land_in_is_told_by_the_next_install(engine: Engine) -> None:
    engine.desk.on_view = engine.installer.lander.attend
    engine.remote.layouts["L1"] = ArenaError("the landing arena needs more than there is")
    engine.trainer("far")
    until(lambda: engine.installer.lander.failure is not None)
    for _ in range(2):
        refused = engine.install(1)
        assert isinstance(refused, ArenaError)
        assert "landing arena" in str(refused)
    assert not engine.core.install.asking


def test_arenas_that_no_version_needs_are_unmapped_between_installs(engine: Engine) -> None:
    engine.publish(1)
    assert engine.install(1)["changed"]
    with engine.desk.changed:
        assert not engine.installer.untidy
    held = {*engine.installer._readers, *engine.installer._landing}
    assert held
    engine.tell(publications={"p1": None}, committed="")
    with engine.desk.changed:
        assert engine.installer.untidy
    with engine.installer._busy:  # an install is under way: it is its matter
        with engine.desk.changed:
            assert not engine.installer.untidy
        engine.installer.tidy()
    assert held == {*engine.installer._readers, *engine.installer._landing}
    found = engine.desk.await_tidily(
        lambda: "over" if not engine.installer._readers else None, time.monotonic() + 10, str
    )
    assert found == "over", "whoever waits does it meanwhile"
    assert not engine.installer._landing
    with engine.desk.changed:
        assert not engine.installer.untidy
    with pytest.raises(NothingInstallable):
        engine.installer.rehearse()
