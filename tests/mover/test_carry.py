"""What movers land, by real processes over gloo: exact bytes, exact traffic, resume, and nothing marked that is not right."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic_reshard.communicator.gloo import GlooBackend
from tests.mover import world as w
from tests.mover.world import KIB, Mover, Page, Parcel, World, model, small
from tests.plan.execute import cell_ingress, least_ingress
from tests.processes import Rank, run_ranks


def four_hosts(**options: Any) -> World:
    """FSDP4 on two hosts, two engines of TP2 on two others; nothing divides evenly."""
    engine = model(2, dim=-1)
    return World(model(4), ("t", "t", "u", "u"), {"a": (engine, ("e", "e")), "b": (engine, ("f", "f"))}, **options)


def mixed() -> World:
    """Trainers beside engines: some cells lie in the domain, some partly; engines of unlike layouts."""
    return World(
        model(3), ("x", "y", "y"), {"a": (model(2, dim=-1), ("y", "z")), "b": (model(1, copies=2), ("x", "z"))}
    )


WORLDS: dict[str, Any] = {
    "four hosts": four_hosts,
    "trainers beside engines": mixed,
    "long messages from slot to slot": lambda: four_hosts(cell=128 * KIB, message=256 * KIB, staging=1024 * KIB),
    "all is digested": lambda: four_hosts(verify="full"),
}
Played = dict[str, tuple[World, list[Any], list[list[dict[str, Any]]]]]


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    """Each world's first publication, the second, and the first once more without a basis; by the same processes."""
    worlds = {name: make() for name, make in WORLDS.items()}
    stages = []
    for world in worlds.values():
        first = world.documents()
        world.publish()
        stages.append([first, world.documents(2), (first[0].model_copy(update={"id": "again", "epoch": 3}), first[1])])
    parcels = [[x.parcels(*docs) for docs in told] for x, told in zip(worlds.values(), stages, strict=True)]
    results = run_ranks(w.transfers, 8, parcels, group=False)
    yield {name: (world, stages[n], [r[n] for r in results if r[n]]) for n, (name, world) in enumerate(worlds.items())}
    for world in worlds.values():
        world.close()


def ingress(world: World, said: list[dict[str, Any]], present: tuple[str, ...]) -> Counter[int]:
    """Bytes that came into each domain, as the movers counted."""
    found: Counter[int] = Counter()
    labels = list(dict.fromkeys(world.hosts))
    for member, one in zip(present, said, strict=True):
        found[labels.index(world.hosts[world.members.index(member)])] += one["received"]
    return +found


@pytest.mark.parametrize("case", WORLDS)
def test_every_domain_gets_what_it_needs_exactly_once(played: Played, case: str) -> None:
    world, stages, results = played[case]
    for version in (1, 2):
        doc, publication = stages[version - 1]
        said = [r[version - 1] for r in results]
        assert {s["outcome"] for s in said} == {"done"}, said
        world.version = version
        world.check_landed()
        plan = world.plan(doc, publication)
        assert plan.rounds.count > 3
        assert ingress(world, said, doc.present) == least_ingress(plan)
        assert sum(s["sent"] for s in said) == sum(s["received"] for s in said)
        assert sum(s["cells"] for s in said) == sum(int(world.held(m).sum()) for m in world.landings) > 0
        assert sum(s["resent"] for s in said) == 0


@pytest.mark.parametrize("case", WORLDS)
def test_what_is_there_and_unknown_to_the_plan_moves_again_and_is_counted(played: Played, case: str) -> None:
    world, _, results = played[case]
    again = [r[2] for r in results]
    assert {s["outcome"] for s in again} == {"done"}
    assert [s["resent"] for s in again] == [s["received"] for s in again] == [r[0]["received"] for r in results]
    world.version = 1
    world.check_landed()


def stopped(me: Rank, parcels: list[Parcel], last: int | None) -> dict[str, Any]:
    """Hold at the beginning, or (None) after the first round; tell what was begun; end after the round that all agree on."""
    mover = Mover(me, parcels[me.rank].member)
    doc = mover.begin(parcels[me.rank]).transfer
    if last is None:
        mover.meet()
        mover.until(lambda p: p.began > 0)
    mover.worker.hold()
    held = mover.until(lambda p: p.held)
    if last is None:
        mover.store.set(f"began{me.rank}", str(mover.worker._job.gate.began))  # type: ignore[union-attr]
        last = max(int(mover.store.get(f"began{rank}")) for rank in range(me.size)) - 1
    else:
        assert held.began == 0
        mover.meet()
    mover.worker.until(last)
    said = mover.until(lambda p: p.state == "out")
    mover.over()
    return w.brief(said) | {"last": last, "size": len(doc.present)}


@pytest.mark.parametrize("last", [2, pytest.param(None, marks=pytest.mark.long)])
def test_a_planned_end_is_after_the_same_round_for_all_and_the_rest_moves_later(last: int | None) -> None:
    world = small()
    doc, publication = world.documents()
    said = w.run(stopped, world.parcels(doc, publication), last)
    ends = {s["last"] for s in said}
    assert len(ends) == 1
    rounds = world.plan(doc, publication).rounds.count
    assert {s["outcome"] for s in said} == {"done" if ends == {rounds - 1} else "stopped"}
    assert max(s["began"] for s in said) == ends.pop() + 1
    assert all(world.wrong(m) == [] for m in world.landings)
    before = sum(int(world.held(m).sum()) for m in world.landings)
    assert before == sum(s["cells"] for s in said)
    if last is not None:
        assert 0 < before < sum(len(world.held(m)) for m in world.landings)
    resume(world)
    world.close()


def resume(world: World, epoch: int = 2) -> list[dict[str, Any]]:
    """A new plan over what has landed moves only the rest."""
    doc, publication = world.documents(epoch, world.basis())
    results = run_ranks(w.transfers, len(doc.present), [[world.parcels(doc, publication)]], group=False)
    said = [r[0][0] for r in results]
    assert {s["outcome"] for s in said} == {"done"}, said
    world.check_landed()
    assert ingress(world, said, doc.present) == cell_ingress(world.plan(doc, publication))
    assert sum(s["resent"] for s in said) == 0
    return said


class Trap(Page):
    """Does something once totals have reached these."""

    def __init__(self, do: Any, **least: int) -> None:
        super().__init__()
        self.do, self.least = do, least

    def progress(self, **totals: int) -> None:
        super().progress(**totals)
        if self.do is not None and all(totals[name] >= least for name, least in self.least.items()):
            do, self.do = self.do, None
            do()


def killed(me: Rank, parcels: list[Parcel], victim: int) -> dict[str, Any]:
    trap = Trap(lambda: os.kill(os.getpid(), signal.SIGKILL), cells=4) if me.rank == victim else None
    mover = Mover(me, parcels[me.rank].member, page=trap)
    return w.brief(mover.run(parcels[me.rank]))


def test_a_killed_mover_leaves_bits_only_over_right_bytes_and_a_fresh_one_goes_on() -> None:
    world = small()
    doc, publication = world.documents()
    said = w.run(killed, world.parcels(doc, publication), 2, lost=[2])
    assert said[2] is None
    # Who still waited for the dead one says so; who had nothing more to do with it may have ended before.
    assert {s["error"] for s in said if s and s["outcome"] == "failed"} <= {"PeerLost"}
    assert any(s and s["outcome"] == "failed" for s in said)
    victim = world.members[2]
    assert 4 <= int(world.held(victim).sum()) < len(world.held(victim))
    assert all(world.wrong(m) == [] for m in world.landings)
    resume(world)
    world.close()


def rewritten(me: Rank, parcels: list[Parcel], where: tuple[int, int, int] | None) -> dict[str, Any]:
    """Rank 0's own source slot is rewritten after its first rounds, as by an owner who may not."""

    def rewrite() -> None:
        assert where is not None
        fd, word, end = where
        with open(f"/proc/{parcels[0].pid}/fd/{fd}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[word] += 1
            memory[word + 4096 : end] = b"\xee" * (end - word - 4096)

    trap = Trap(rewrite, sent=1) if me.rank == 0 else None
    mover = Mover(me, parcels[me.rank].member, page=trap)
    return w.brief(mover.run(parcels[me.rank]))


def test_a_slot_that_is_rewritten_meanwhile_is_never_marked() -> None:
    world = small()
    doc, publication = world.documents()
    arena = world.sources[world.members[0]]
    size = arena.nbytes // 2
    said = w.run(rewritten, world.parcels(doc, publication), (arena.fd, world.slot * size, world.slot * size + size))
    assert said[0]["outcome"] == "failed"
    assert said[0]["error"] == "TransferError"
    assert "rewritten" in said[0]["reason"]
    assert all(s["outcome"] == "failed" for s in said[2:]), said
    assert all(world.wrong(m) == [] for m in world.landings)
    assert 0 < sum(int(world.held(m).sum()) for m in world.landings) < sum(len(world.held(m)) for m in world.landings)
    world.close()


class Corrupting:
    """gloo, with one received message after some that were right changed on its way."""

    def __init__(self, after: int) -> None:
        self.inner, self.left = GlooBackend("lo"), after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def form(self, *args: Any) -> Any:
        made = self.inner.form(*args)
        network, receive, outer = made.network, made.network.receive, self

        class Pending:
            def __init__(self, inner: Any, buffer: torch.Tensor) -> None:
                self.inner, self.buffer = inner, buffer

            def wait(self, deadline: float) -> None:
                self.inner.wait(deadline)
                if self.buffer.numel() > 16:  # not a seal
                    outer.left -= 1
                    if outer.left == 0:
                        self.buffer[self.buffer.numel() // 2] ^= 64

        network.receive = lambda peer, buffer, number=None: Pending(receive(peer, buffer, number), buffer)
        return made


def corrupted(me: Rank, first: list[Parcel], again: list[Parcel]) -> dict[str, Any]:
    backend = Corrupting(1 << 30)
    mover = Mover(me, first[me.rank].member, backend=backend)
    assert mover.run(first[me.rank]).outcome == "done"
    mover.over()
    if me.rank == 2:
        backend.left = 4
    return w.brief(mover.run(again[me.rank]))


def test_bytes_that_changed_on_the_way_are_never_marked() -> None:
    """Not even where they were right before: all moves once more, and on the way one message is changed."""
    world = small(verify="full")
    doc, publication = world.documents()
    again = doc.model_copy(update={"id": "again", "epoch": 2})
    said = w.run(corrupted, world.parcels(doc, publication), world.parcels(again, publication))
    assert (said[2]["outcome"], said[2]["error"]) == ("failed", "DigestMismatch")
    assert "cells" in said[2]["reason"]
    assert all(world.wrong(m) == [] for m in world.landings)
    assert 0 < int(world.held(world.members[2]).sum()) < len(world.held(world.members[2]))
    world.close()


def left(me: Rank, parcels: list[Parcel]) -> dict[str, Any]:
    """Rank 1 begins no round; rank 0 waits for it, says for whom, and is told to get out."""
    mover = Mover(me, parcels[me.rank].member)
    mover.begin(parcels[me.rank])
    if me.rank == 1:
        mover.worker.hold()
    mover.meet()
    waited = None
    if me.rank == 0:
        deadline = time.monotonic() + 20
        while mover.page.now is None and time.monotonic() < deadline:
            time.sleep(0.001)
        waited = mover.page.now
        begun = time.monotonic()
        mover.worker.abort()
        said = mover.until(lambda p: p.state == "out")
        assert time.monotonic() - begun < 5
        mover.store.set("left", "")
    else:
        mover.store.get("left")
        mover.worker.until(1000)  # so that it sees that nobody is there any more
        said = mover.until(lambda p: p.state == "out")
    mover.worker.finish()
    return w.brief(said) | {"waited": waited}


def test_who_is_told_to_leave_leaves_and_the_others_are_not_left_waiting() -> None:
    world = World(model(1), ("t",), {"a": (model(1), ("e",))})
    doc, publication = world.documents()
    first, second = w.run(left, world.parcels(doc, publication))
    assert (first["outcome"], first["error"]) == ("stopped", "")
    assert first["waited"] == 1
    assert (second["outcome"], second["error"]) == ("failed", "PeerLost")
    assert second["blames"] == (world.members[0],)
    world.close()
