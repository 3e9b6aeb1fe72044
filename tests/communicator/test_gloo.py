"""The gloo backend between real processes, some of which are killed or stopped; and what it refuses before it connects."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from elastic_reshard import interfaces
from elastic_reshard.communicator import (
    Communicator,
    ControlStore,
    GlooBackend,
    GlooCommunicator,
    Name,
    Registry,
)
from elastic_reshard.errors import PeerLost, PeerRefused, ProtocolError, TransferError, TransferTimeout
from elastic_reshard.interfaces import VARIABLE
from elastic_reshard.transport import GlooNetwork
from tests.communicator.world import (
    Plane,
    error_of,
    formed,
    numbered,
    open_files,
    ring,
    soon,
    stores,
    threads,
    together,
    until,
)
from tests.processes import Rank, run_ranks

NAME, NEXT, THIRD = Name(1, "t"), Name(2, "t"), Name(3, "t")


class World:
    """One rank process: its registry, its control plane, its backend; and words to the others."""

    def __init__(self, me: Rank) -> None:
        self.me, self.plane, self.registry = me, Plane(me), Registry()
        self.board = self.plane.board
        self.backend = GlooBackend("lo")

    def form(self, name: Name, ranks: list[int], seconds: float = 20.0) -> Communicator:
        rank = ranks.index(self.me.rank)
        store = self.plane.store(name, rank, len(ranks))
        return self.registry.form(self.backend, store, rank, len(ranks), soon(seconds), tuple)

    def meet(self, what: str, ranks: list[int]) -> None:
        self.board.set(f"{what}/{self.me.rank}")
        for rank in ranks:
            self.board.get(f"{what}/{rank}")

    def close(self) -> None:
        assert self.registry.abort_all(soon(), "end").out
        self.plane.close()


def turn(communicator: Communicator, value: int) -> bool:
    into = torch.zeros(1000, dtype=torch.uint8)
    before, after = (communicator.rank - 1) % communicator.size, (communicator.rank + 1) % communicator.size
    hear = communicator.network.receive(before, into)
    say = communicator.network.send(after, numbered(communicator.rank, value))
    hear.wait(soon())
    say.wait(soon())
    return torch.equal(into, numbered(before, value))


def epochs(me: Rank) -> list[Any]:
    world = World(me)
    told = []
    for epoch in range(1, 4):
        communicator = world.form(Name(epoch, "t"), list(range(me.size)))
        told.append((turn(communicator, epoch), communicator.busy, world.registry.close(communicator, soon()).out))
    told.append(world.registry.pending)
    world.close()
    return told


def test_epochs_of_processes_form_and_move() -> None:
    assert run_ranks(epochs, 3, group=False) == [[(True, 0, True)] * 3 + [()]] * 3


@pytest.mark.parametrize("rounds", [50, pytest.param(200, marks=pytest.mark.long)])
def test_descriptors_and_threads_stay_flat(rounds: int) -> None:
    """One in five formations fails: a member never comes, and the store is cancelled."""
    backend, seen = GlooBackend("lo"), []
    registries = [Registry(), Registry()]
    for number in range(rounds):
        name = Name(number, "t")
        if number % 5 == 4:
            store = stores(name, 2)[0]
            threading.Timer(0.01, store.cancel, [TransferError("nobody comes")]).start()
            assert "nobody comes" in str(error_of(lambda n=store: registries[0].form(backend, n, 0, 2, soon(), tuple)))  # type: ignore[misc]
        else:
            communicators = formed([backend, backend], registries, name)
            ring(communicators, number)
            for registry in registries:
                assert registry.abort_all(soon(), "next").out
            del communicators
        seen.append((open_files(), threads()))
    until(lambda: registries[0].pending == (), "out")
    # Of what is ending just then some rounds see more; what leaks never goes.
    early, late = seen[rounds // 2 - 10 : rounds // 2], seen[-10:]
    assert min(late)[0] <= min(early)[0]
    assert min(t for _, t in late) <= min(t for _, t in early)
    until(lambda: open_files() <= min(early)[0], "no more descriptors than half of the rounds before")
    until(lambda: threads() <= min(t for _, t in early), "no more threads than then")


def test_a_member_that_never_comes_is_named_at_the_deadline() -> None:
    backend, local = GlooBackend("lo"), stores(NAME, 3)
    begun = time.monotonic()
    errors = together(
        [lambda r=r: Registry().form(backend, local[r], r, 3, soon(0.7), tuple) for r in (0, 2)]  # type: ignore[misc]
    )
    assert 0.5 < time.monotonic() - begun < 5
    for error in errors:
        assert isinstance(error, TransferTimeout)
        assert error.members == (1,)
        assert "rank(s) 1 of 3 never came" in str(error)


def test_a_formation_is_cancelled_at_once() -> None:
    backend, registry, store = GlooBackend("lo"), Registry(), stores(NAME, 3)[0]
    reason = TransferError("rank 2 is lost")
    threading.Timer(0.2, store.cancel, [reason]).start()
    begun = time.monotonic()
    assert error_of(lambda: registry.form(backend, store, 0, 3, soon(60), tuple)) is reason
    assert time.monotonic() - begun < 3
    until(lambda: registry.pending == (), "the backend's own call ends too")


def announced(me: Rank, number: int, deadline: float) -> Any:
    """Rank 1 announces itself and is gone, or frozen, at once; the others end by their deadline, and form without it."""
    world = World(me)
    if me.rank == 1:
        store = world.plane.store(NAME, 1, 3, lambda: os.kill(os.getpid(), number))
        world.registry.form(world.backend, store, 1, 3, soon(20), tuple)
    begun = time.monotonic()
    error = error_of(lambda: world.form(NAME, [0, 1, 2], deadline))
    took = time.monotonic() - begun
    until(lambda: world.registry.pending == (), "the backend's own call ends too", 10)
    again = turn(world.form(NEXT, [0, 2]), 5)
    world.close()
    return type(error).__name__, 1 in getattr(error, "members", ()), took, again


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_member_that_ends_after_it_announced_itself(number: int) -> None:
    for told in run_ranks(announced, 3, number, 1.5, group=False, lost=[1])[::2]:
        name, named, took, again = told
        assert name in (TransferTimeout.__name__, PeerLost.__name__)
        assert named
        assert took < 4
        assert again


def killed_before_the_first_transfer(me: Rank) -> Any:
    world = World(me)
    communicator = world.form(NAME, [0, 1, 2])
    if me.rank == 1:
        world.board.set("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    world.board.get("dies")
    begun = time.monotonic()
    errors = [
        error_of(lambda: communicator.network.receive(1, torch.zeros(8, dtype=torch.uint8)).wait(soon(3))) for _ in "ab"
    ]
    took = time.monotonic() - begun
    world.close()
    return [(type(e).__name__, getattr(e, "members", ())) for e in errors], took


def test_a_member_killed_before_the_first_transfer_is_named() -> None:
    for errors, took in run_ranks(killed_before_the_first_transfer, 3, group=False, lost=[1])[::2]:
        assert errors == [(PeerLost.__name__, (1,))] * 2
        assert took < 3.5


def aborts_beside_the_dead(me: Rank, dead: int, aborter: int, pairs: int, backwards: bool) -> Any:
    """Two communicators; one member dies; one aborts all it has; the third, which waits for the aborter, is freed."""
    world = World(me)
    formed_ = [world.form(Name(1, f"t{i}"), [0, 1, 2]) for i in range(pairs)]
    world.meet("formed", [0, 1, 2])
    if me.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    for communicator in reversed(formed_) if backwards else formed_:
        error = error_of(
            lambda c=communicator: c.network.receive(dead, torch.zeros(8, dtype=torch.uint8)).wait(soon(5))
        )  # type: ignore[misc]
        assert isinstance(error, PeerLost), error
    world.meet("seen", [r for r in range(3) if r != dead])
    waiter = 3 - dead - aborter
    if me.rank == aborter:
        # What keeps gloo's group alive, as an operation that is blocked does: dropping it would close the pairs too.
        held = [c.network.receive(waiter, torch.zeros(8, dtype=torch.uint8)) for c in formed_]
        world.board.get("waits")
        begun = time.monotonic()
        report = world.registry.abort_all(soon(5), "loss")
        took = time.monotonic() - begun
        world.board.get("freed")
        assert len(held) == pairs
        world.close()
        return report.out, len(report.returned), took
    pending = [c.network.receive(aborter, torch.zeros(8, dtype=torch.uint8)) for c in formed_]
    world.board.set("waits")
    begun = time.monotonic()
    freed = [isinstance(error_of(lambda p=p: p.wait(soon(20))), PeerLost) for p in pending]  # type: ignore[misc]
    took = time.monotonic() - begun
    world.board.set("freed")
    world.close()
    return all(freed), len(freed), took


@pytest.mark.parametrize(("dead", "aborter", "backwards"), [(1, 0, False), (0, 2, True), (2, 0, False)])
def test_an_abort_frees_all_peers_also_beside_a_dead_one(dead: int, aborter: int, backwards: bool) -> None:
    told = run_ranks(aborts_beside_the_dead, 3, dead, aborter, 2, backwards, group=False, lost=[dead])
    for rank, result in enumerate(told):
        if rank != dead:
            good, count, took = result
            assert good
            assert count == 2
            assert took < 4


def large_to_the_frozen(me: Rank) -> Any:
    """Rank 1 is stopped in a large transfer: an abort returns, and is not called out while the operation is inside."""
    world = World(me)
    communicator = world.form(NAME, [0, 1, 2])
    if me.rank == 1:
        into = torch.zeros(64 << 20, dtype=torch.uint8)
        pending = communicator.network.receive(0, into)  # so that the bytes really are on their way when it stops
        world.board.set("pid", str(os.getpid()))
        pending.wait(soon(30))
    if me.rank == 2:
        error = error_of(lambda: communicator.network.receive(0, torch.zeros(8, dtype=torch.uint8)).wait(soon(20)))
        world.close()
        return type(error).__name__, time.monotonic()
    os.kill(int(world.board.get("pid")), signal.SIGSTOP)
    found: list[BaseException | None] = []
    big = torch.zeros(64 << 20, dtype=torch.uint8)
    thread = threading.Thread(
        target=lambda: found.append(error_of(lambda: communicator.network.send(1, big).wait(soon(2.5))))
    )
    thread.start()
    network = communicator.network
    # The kernel's buffers are full by then: the operation is in flight, which nothing but its own deadline ends.
    until(lambda: network.waiting_since is not None and time.monotonic() - network.waiting_since > 0.1, "in flight")
    begun = time.monotonic()
    report = world.registry.abort_all(soon(1), "frozen")
    took = time.monotonic() - begun
    inside, pending = thread.is_alive(), world.registry.pending
    thread.join(20)
    until(lambda: world.registry.pending == (), "out after all")
    world.plane.close()
    return report.out, report.busy, inside, pending, took, str(found[0])


def test_an_abort_that_returned_is_not_out_while_an_operation_is_inside() -> None:
    told, _, (freed, _) = run_ranks(large_to_the_frozen, 3, group=False, lost=[1])
    out, busy, inside, pending, took, error = told
    assert inside
    assert not out
    assert busy == ((NAME, 1),)
    assert pending == ("communicator 1/t",)
    assert took < 3
    assert "was aborted: frozen" in error
    assert freed == PeerLost.__name__


def mute(me: Rank, cancelled: bool) -> Any:
    """Rank 1 connects and then says nothing. gloo calls that formed; the greeting finds it out."""
    world = World(me)
    if me.rank == 1:
        GlooCommunicator.greet = lambda *_: time.sleep(60)  # type: ignore[method-assign,assignment]
        world.form(NAME, [0, 1, 2])
    store = world.plane.store(NAME, me.rank, 3)
    network = GlooNetwork.receive

    def receive(self: GlooNetwork, *args: Any) -> Any:
        if cancelled:
            threading.Timer(0.2, store.cancel, [TransferError("rank 1 is frozen")]).start()
        return network(self, *args)

    GlooNetwork.receive = receive  # type: ignore[method-assign]
    begun = time.monotonic()
    seconds = 60.0 if cancelled else 1.0
    error = error_of(lambda: world.registry.form(world.backend, store, me.rank, 3, soon(seconds), tuple))
    took = time.monotonic() - begun
    GlooNetwork.receive = network  # type: ignore[method-assign]
    until(lambda: world.registry.pending == (), "out")
    world.plane.close()
    return type(error).__name__, str(error), getattr(error, "members", None), took


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_frozen_member_is_found_in_the_greeting(cancelled: bool) -> None:
    told = run_ranks(mute, 3, cancelled, group=False, lost=[1])
    for name, text, members, took in told[::2]:
        assert took < 10
        if cancelled:
            assert text == "rank 1 is frozen"
        else:  # who gives up first closes its pairs: the other may see that instead
            assert members == (1,)
            assert name in (TransferTimeout.__name__, PeerLost.__name__)
            assert "did not greet" in text


class Other(GlooBackend):
    config = "gloo torch=1.0"  # type: ignore[assignment]


def test_unlike_versions_are_refused_before_anything_connects() -> None:
    errors = formed([GlooBackend("lo"), Other("lo"), GlooBackend("lo")], [Registry(), Registry(), Registry()], NAME)
    for error in errors:
        assert isinstance(error, ProtocolError)
        assert "member of rank 1 has 'gloo torch=1.0'" in str(error)


def test_loopback_between_machines_is_refused_before_anything_connects() -> None:
    backends, registries = [GlooBackend("lo"), GlooBackend("lo")], [Registry(), Registry()]
    backends[1].machine = "another"
    errors = formed(backends, registries, NAME)
    for error in errors:
        assert isinstance(error, ProtocolError)
        assert VARIABLE in str(error)
        assert "member 0 would be reached by lo (127.0.0.1)" in str(error)
        assert "member 1 would be reached by lo (127.0.0.1)" in str(error)
    until(lambda: [r.pending for r in registries] == [(), ()], "out")


def test_one_setting_names_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    assert GlooBackend().address.interface == "lo"
    with pytest.raises(ProtocolError, match="nothing1"):
        GlooBackend("nothing1")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ProtocolError, match="nothing0"):
        GlooBackend()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert GlooBackend().address in interfaces.addresses()


def test_the_interface_found_without_a_setting_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    registries = [Registry(), Registry()]
    communicators = formed([GlooBackend(), GlooBackend()], registries, NAME)
    ring(communicators, 1)
    assert all(r.abort_all(soon(), "end").out for r in registries)


def test_members_of_unlike_communicators_name_each_other() -> None:
    """Names come from the coordinator; if they differ all the same, the greeting says so and nothing moves."""
    made: list[ControlStore] = []
    made.append(ControlStore(NAME, lambda key, value: made[1].feed({key: value})))
    made.append(ControlStore(NEXT, lambda key, value: made[0].feed({key: value})))
    backend, registries = GlooBackend("lo"), [Registry(), Registry()]
    errors = together([lambda r=r: registries[r].form(backend, made[r], r, 2, soon(5), tuple) for r in range(2)])  # type: ignore[misc]
    refused = [e for e in errors if isinstance(e, PeerRefused)]
    assert refused
    assert all(isinstance(e, TransferError) for e in errors)
    assert "formed another communicator than" in str(refused[0])


def test_gloo_has_no_native_change() -> None:
    backend, registries = GlooBackend("lo"), [Registry(), Registry()]
    communicators = formed([backend, backend], registries, NAME)
    with pytest.raises(TransferError, match="cannot shrink communicator 1/t"):
        registries[0].shrink(communicators[0], NEXT, [1], soon(1), 1.0)
    assert registries[0].pending == ()  # the parent was aborted: one attempt
    with pytest.raises(TransferError, match="cannot grow"):
        registries[1].grow(communicators[1], ControlStore(THIRD), 3, soon(1), 1.0)
    with pytest.raises(TransferError, match="cannot grow"):
        registries[1].join(backend, ControlStore(NEXT), 2, 3, [2], soon(1), tuple)
    assert registries[1].pending == ()
