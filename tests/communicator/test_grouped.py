"""Backends with groups between real processes: formed, changed, left; and peers that are killed or frozen under them.

Over the pretend device, and over NCCL where there is a GPU (several ranks on one).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from elastic_reshard.arena.boxes import array_at
from elastic_reshard.arena.pretend import open_pretend
from elastic_reshard.communicator import Capabilities, Name, Registry
from elastic_reshard.communicator.fake import Fault, Faults
from elastic_reshard.communicator.grouped import GroupedCommunicator
from elastic_reshard.communicator.pretend import PretendBackend
from elastic_reshard.errors import PeerLost, PeerRefused, ProtocolError, TransferError, TransferTimeout
from tests.communicator.groups import KINDS, World, everybody, grouped, patience, stuck
from tests.communicator.world import error_of, formed, soon, stores, together, until
from tests.processes import Rank, run_ranks

NAME, NEXT, THIRD = Name(1, "t"), Name(2, "t"), Name(3, "t")


def epochs(me: Rank, kind: str) -> list[Any]:
    world = World(me, kind)
    told = []
    for epoch in range(1, 4):
        communicator = world.form(Name(epoch, "t"), list(range(me.size)))
        good = [everybody(world, communicator, 10 * epoch + n) for n in range(3)]
        told.append((good, communicator.busy, world.registry.close(communicator, soon()).out))
    told.append(world.registry.pending)
    world.close()
    return told


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_epochs_form_exchange_and_end(kind: str, size: int) -> None:
    assert (
        run_ranks(epochs, size, kind, group=False, timeout=patience(kind))
        == [[([True] * 3, 0, True)] * 3 + [()]] * size
    )


def changed(me: Rank, kind: str) -> dict[str, Any]:
    """Four; the last leaves natively; a fresh process comes natively; every exchange is right, and parents are left."""
    world, told = World(me, kind), dict[str, Any]()
    first, rank = [0, 1, 2, 3], me.rank
    if rank < 4:
        parent = world.form(NAME, first)
        told["first"] = everybody(world, parent, 1)
        world.meet("first", first)
        if rank == 3:
            told["left"] = world.registry.abort_all(soon(), "it leaves").out
        else:
            smaller = world.registry.shrink(parent, NEXT, [3], soon(), 10.0)
            told["shrunk"] = (smaller.rank, smaller.size, everybody(world, smaller, 2))
            store = world.plane.store(THIRD, rank, 4)
            grown = world.registry.grow(smaller, store, 4, soon(), 10.0)
    if rank == 4:
        world.board.get("first/0")
        grown = world.registry.join(world.backend, world.plane.store(THIRD, 3, 4), 3, 4, [3], soon(), tuple)
    if rank != 3:
        told["grown"] = (grown.rank, grown.size, everybody(world, grown, 3))
        told["pending"] = world.registry.pending
        told["out"] = world.registry.close(grown, soon()).out
    world.close()
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_a_communicator_shrinks_and_grows(kind: str) -> None:
    results = run_ranks(changed, 5, kind, group=False, timeout=patience(kind))
    for rank, told in enumerate(results):
        assert told.get("first", True)
        if rank < 3:
            assert told["shrunk"] == (rank, 3, True)
        if rank != 3:
            assert told["grown"] == (min(rank, 3), 4, True)
            assert told["pending"] == ("communicator 3/t",)  # parents have let go
            assert told["out"]
    assert results[3]["left"]


def lost(me: Rank, kind: str, number: int) -> dict[str, Any]:
    """Member 1 ends or freezes; the others are in an exchange with it, which nothing ends but an abort from another thread."""
    world = World(me, kind)
    communicator = world.form(NAME, [0, 1, 2])
    assert everybody(world, communicator, 1)
    world.meet("formed", [0, 1, 2])
    if me.rank == 1:
        os.kill(os.getpid(), number)
        time.sleep(60)
    pending, found = stuck(world, communicator, 1), list[BaseException | None]()
    thread = threading.Thread(target=lambda: found.append(error_of(lambda: pending.wait(soon(60)))))
    thread.start()
    until(lambda: communicator.busy == 1, "it waits")
    time.sleep(0.5)
    silent = not found  # nobody told of the loss
    begun = time.monotonic()
    report = world.registry.abort_all(soon(10), "member 1 is lost")
    took = time.monotonic() - begun
    thread.join(5)
    again = world.form(NEXT, [0, 2])
    good = everybody(world, again, 2)
    world.close()
    return {"silent": silent, "out": report.out, "why": report.why, "took": took, "error": str(found[0]), "good": good}


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)], ids=["killed", "stopped"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_from_another_thread_ends_a_wait_for_the_lost(kind: str, number: int) -> None:
    results = run_ranks(lost, 3, kind, number, group=False, lost=[1], timeout=patience(kind))
    for rank, told in enumerate(results):
        if rank != 1:
            assert told["silent"]
            assert told["out"], told["why"]
            assert told["took"] < 5
            assert "communicator 1/t was aborted: member 1 is lost" in told["error"]
            assert told["good"]


def late(me: Rank, kind: str) -> dict[str, Any]:
    world = World(me, kind)
    communicator = world.form(NAME, [0, 1])
    told: dict[str, Any] = {}
    if me.rank == 0:
        begun = time.monotonic()
        error = error_of(lambda: stuck(world, communicator, 1).wait(soon(0.7)))
        told = {"kind": type(error).__name__, "members": getattr(error, "members", None)}
        told["took"] = time.monotonic() - begun
    world.meet("late", [0, 1])
    begun = time.monotonic()
    told["out"] = world.registry.close(communicator, soon(20)).out
    world.close()
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_ends_a_wait_and_names_whom_it_was_for(kind: str) -> None:
    told, other = run_ranks(late, 2, kind, group=False, timeout=patience(kind))
    assert (told["kind"], told["members"]) == (TransferTimeout.__name__, (1,))
    assert 0.5 < told["took"] < 5
    assert told["out"]  # by abort: something failed there
    assert other["out"]


def never(me: Rank, kind: str) -> dict[str, Any]:
    """Of three ranks one never comes: named at the deadline; cancelled at once; and the two form without it."""
    world = World(me, kind)
    begun = time.monotonic()
    # NCCL takes its time for the first id of a process.
    missing = error_of(lambda: world.form(NAME, [0, 1, 2], 1.5 if kind == "pretend" else 5.0))
    took = time.monotonic() - begun
    store = world.plane.store(NEXT, me.rank, 3)
    threading.Timer(0.2, store.cancel, [TransferError("rank 2 is lost")]).start()
    begun = time.monotonic()
    cancelled = error_of(lambda: world.registry.form(world.backend, store, me.rank, 3, soon(60), tuple))
    quick = time.monotonic() - begun
    until(lambda: world.registry.pending == (), "the backend's own call ends too", 10)
    good = everybody(world, world.form(THIRD, [0, 1]), 3)
    world.registry.abort_all(soon(), "end")
    world.board.set("nobody/2", "{}")
    world.board.set(f"{NAME}/2", "{}")
    world.board.set(f"{NEXT}/2", "{}")
    world.close()
    return {"missing": str(missing), "took": took, "cancelled": str(cancelled), "quick": quick, "good": good}


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_never_comes_holds_no_formation(kind: str) -> None:
    for told in run_ranks(never, 2, kind, group=False, timeout=patience(kind)):
        assert 1.0 < told["took"] < 8
        assert "2" in told["missing"]
        assert told["cancelled"] == "rank 2 is lost"
        assert told["quick"] < 5
        assert told["good"]


# The pretend backend alone: what NCCL would have to be made to do.


def pair(faults: Faults | None = None, **options: Any) -> tuple[list[Registry], list[GroupedCommunicator]]:
    device, registries = open_pretend(0), [Registry(), Registry()]
    backends = [PretendBackend(device, faults, **options), PretendBackend(device, **options)]
    return registries, formed(backends, registries, NAME)


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.RAISE])
def test_an_abort_that_does_not_work_is_not_out(fault: Fault) -> None:
    faults = Faults({"abort": {fault: 1.0}})
    registries, communicators = pair(faults)
    report = registries[0].abort_all(soon(0.3), "it hangs")
    assert not report.out
    assert registries[0].pending == ("communicator 1/t",)
    faults.released.set()
    assert registries[1].abort_all(soon(), "end").out
    if fault is Fault.HANG:
        until(lambda: registries[0].pending == (), "out")
    communicators[0]._native._inner.free()  # type: ignore[attr-defined]


def test_a_peer_that_leaves_is_told_where_the_backend_tells() -> None:
    registries, communicators = pair(tells=True)
    piece = open_pretend(0).scratch(64).strided(0, (64,), (1,), 1)
    pending = grouped(communicators[0]).exchange([], [(1, piece)], soon())
    assert registries[1].abort_all(soon(), "it leaves").out
    error = error_of(lambda: pending.wait(soon(10)))
    assert isinstance(error, PeerLost)
    assert error.members == (1,)
    assert registries[0].close(communicators[0], soon()).out


def test_nothing_is_written_after_an_abort_has_returned() -> None:
    """What was launched behind an aborted group is carried out before the abort returns, not later over newer bytes."""
    registries, communicators = pair()
    network, device = grouped(communicators[0]), open_pretend(0)
    piece, target = (device.scratch(64).strided(0, (64,), (1,), 1) for _ in range(2))
    network.exchange([], [(1, piece)], soon())

    def copy() -> bool:
        array_at(target)[:] = 7
        return True

    network.stream.submit(copy)  # type: ignore[attr-defined]
    assert not array_at(target).any()
    assert registries[0].abort_all(soon(), "left").out
    assert array_at(target).tolist() == [7] * 64
    array_at(target)[:] = 9
    assert network.stream.record().done()
    assert array_at(target).tolist() == [9] * 64
    assert registries[1].abort_all(soon(), "end").out


def test_ends_of_unlike_names_or_configs_refuse_each_other() -> None:
    device, registries = open_pretend(0), [Registry(), Registry()]
    errors = formed([PretendBackend(device), PretendBackend(device, config="other")], registries, NAME)
    assert any(isinstance(e, PeerRefused) for e in errors)
    assert all(isinstance(e, TransferError) for e in errors)
    until(lambda: [r.pending for r in registries] == [(), ()], "out")


def test_a_backend_that_cannot_change_says_so_and_one_change_is_all() -> None:
    registries, communicators = pair(capabilities=Capabilities())
    with pytest.raises(TransferError, match="cannot shrink communicator 1/t"):
        communicators[0].shrink(NEXT, [1], soon())
    with pytest.raises(TransferError, match="cannot grow communicator 1/t"):
        communicators[0].grow(stores(NEXT, 3)[0], 3, soon())
    for registry in registries:
        assert registry.abort_all(soon(), "end").out
    registries, communicators = pair()
    children = together([lambda c=c: c.shrink(NEXT, [], soon()) for c in communicators])  # type: ignore[misc]
    assert [(c.rank, c.size) for c in children] == [(0, 2), (1, 2)]
    with pytest.raises(TransferError, match="was changed once already"):
        communicators[0].shrink(THIRD, [], soon())
    for registry in registries:
        assert registry.abort_all(soon(), "end").out  # children too
    assert [c.network.marked is not None for c in children] == [True, True]


def test_only_a_pretend_device_will_do() -> None:
    class Gpu:
        kind, id = "cuda", "GPU-1"

    with pytest.raises(ProtocolError, match="GPU-1 is no pretend device"):
        PretendBackend(Gpu())  # type: ignore[arg-type]


def test_sizes_that_differ_are_an_error_where_the_backend_tells() -> None:
    registries, communicators = pair(tells=True)
    device = open_pretend(0)
    pieces = [device.scratch(n).strided(0, (n,), (1,), 1) for n in (64, 65)]
    said = grouped(communicators[0]).exchange([(1, pieces[0])], [], soon())
    heard = grouped(communicators[1]).exchange([], [(0, pieces[1])], soon())
    errors = together([lambda: said.wait(soon(5)), lambda: heard.wait(soon(5))])
    assert "64 bytes where 65 were expected" in str(errors[1])
    for registry in registries:
        assert registry.abort_all(soon(), "end").out


def test_a_group_that_an_abort_ended_has_not_arrived() -> None:
    """Its event is done like any other; the mark, which comes before the abort, tells them apart."""
    registries, communicators = pair()
    piece = open_pretend(0).scratch(64).strided(0, (64,), (1,), 1)
    pending = grouped(communicators[0]).exchange([], [(1, piece)], soon())
    assert registries[0].abort_all(soon(), "left").out
    assert grouped(communicators[0]).stream.record().done()
    assert "was aborted: left" in str(error_of(lambda: pending.wait(soon())))
    assert registries[1].abort_all(soon(), "end").out


def test_a_wait_that_is_inside_when_an_abort_ends_its_group_says_so() -> None:
    registries, communicators = pair()
    network = grouped(communicators[0])
    done = network.stream.submit  # type: ignore[attr-defined]

    def ends() -> bool:
        """As an abort does: the mark, then the end of the group."""
        communicators[0].mark("left")
        return True

    done(ends)
    assert "was aborted: left" in str(error_of(lambda: network.point().wait(soon())))
    for registry in registries:
        assert registry.abort_all(soon(), "end").out
