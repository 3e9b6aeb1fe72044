"""Backends that hang, are slow, raise or do nothing: whatever they do, every call ends, and what did not let go is named."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from elastic_reshard.communicator import Capabilities, Communicator, ControlStore, Name, Registry, change, choose
from elastic_reshard.communicator.fake import FakeBackend, FakeCommunicator, Fault, Faults
from elastic_reshard.communicator.sockets import SocketNetwork
from elastic_reshard.errors import PeerLost, PeerRefused, ProtocolError, ReshardError, TransferError, TransferTimeout
from elastic_reshard.transport import Pending
from tests.communicator.world import error_of, fakes, formed, ring, soon, stores, together, until

NAME, NEXT = Name(1, "t"), Name(2, "t")


def always(call: str, fault: Fault, **more: Fault) -> Faults:
    return Faults({call: {fault: 1.0}, **{c: {f: 1.0} for c, f in more.items()}}, slow=0.2)


def blocked(communicator: Communicator, peer: int) -> tuple[threading.Thread, list[BaseException | None]]:
    """An operation that waits for a message that never comes."""
    found: list[BaseException | None] = []
    into = torch.zeros(8, dtype=torch.uint8)
    pending = communicator.network.receive(peer, into)
    thread = threading.Thread(target=lambda: found.append(error_of(lambda: pending.wait(soon(30)))), daemon=True)
    thread.start()
    until(lambda: communicator.busy == 1, "inside")
    return thread, found


def test_formed_moves_and_is_closed() -> None:
    registries = [Registry() for _ in range(4)]
    with fakes(4) as backends:
        communicators = formed(backends, registries, NAME)
        for value in range(3):
            ring(communicators, value)
        assert registries[0].pending == ("communicator 1/t",)
        assert not registries[0].out(NAME)
        for registry, communicator in zip(registries, communicators, strict=True):
            assert registry.close(communicator, soon()).out
            assert registry.pending == ()
            assert registry.out(NAME)
        assert all(b.faults.counts["close", Fault.NONE] == 1 for b in backends)


@pytest.mark.parametrize("ends", ["close", "abort"])
def test_what_ended_well_is_not_kept(ends: str) -> None:
    """A mover forms one for each transfer, for weeks, and asks what is pending only after an error."""
    registry, kept = Registry(), list[weakref.ref[Communicator]]()
    with fakes(1) as backends:
        for number in range(50):
            name = Name(1, f"t{number}")
            communicator = registry.form(backends[0], ControlStore(name), 0, 1, soon(), tuple)
            kept.append(weakref.ref(communicator))
            report = registry.close(communicator, soon()) if ends == "close" else registry.abort_all(soon(), "test")
            assert report.asked == report.returned == (name,)
            assert registry.out(name)
    del communicator
    gc.collect()
    assert [ref() for ref in kept] == [None] * 50


@pytest.mark.parametrize("fault", list(Fault))
def test_formation(fault: Fault) -> None:
    """One member's formation goes wrong: all end by their deadline, and only the one that hangs is stuck."""
    registries = [Registry() for _ in range(3)]
    with fakes(3, [Faults(), always("form", fault), Faults()]) as backends:
        begun = time.monotonic()
        results = formed(backends, registries, NAME, seconds=0.6)
        assert time.monotonic() - begun < 5
        if fault in (Fault.NONE, Fault.SLOW):
            ring(results, 1)
        else:
            assert [isinstance(r, TransferTimeout) for r in (results[0], results[2])] == [True, True]
            assert isinstance(results[1], TransferError) == (fault is not Fault.NOTHING)
        stuck = ("forming 1/t",) if fault is Fault.HANG else None
        assert not stuck or not registries[1].out(NAME)
        reports = [registry.abort_all(soon(1.0), "test") for registry in registries]
        assert [r.out for r in reports] == [True, fault is not Fault.HANG, True]
        if stuck:
            assert registries[1].pending == stuck
            assert reports[1].stuck == (NAME,)
            backends[1].faults.released.set()
        until(lambda: all(r.pending == () for r in registries), "out")


def test_a_formation_that_nobody_waits_for_any_more_is_let_go_of() -> None:
    """Two members' formation is slower than their deadline; then it succeeds: it is aborted, not used."""
    registries = [Registry(), Registry()]
    with fakes(2, [always("form", Fault.HANG), always("form", Fault.HANG)]) as backends:
        results = formed(backends, registries, NAME, seconds=0.2)
        assert all(isinstance(r, TransferTimeout) for r in results)
        for backend in backends:
            backend.faults.released.set()
        until(lambda: all(r.pending == () for r in registries), "out")
    with fakes(2) as backends:
        again = formed(backends, registries, NEXT)
        ring(again, 2)
        assert [r.abort_all(soon(), "end").returned for r in registries] == [(NEXT,), (NEXT,)]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_formation_is_cancelled_at_once_when_a_member_never_comes(hangs: bool) -> None:
    faults = always("form", Fault.HANG) if hangs else Faults()
    registry, store = Registry(), stores(NAME, 3)[0]
    with fakes(1, [faults]) as (backend,):
        threading.Timer(0.1, lambda: store.cancel(TransferError("rank 2 is lost"))).start()
        begun = time.monotonic()
        error = error_of(lambda: registry.form(backend, store, 0, 3, soon(30), tuple))
        assert time.monotonic() - begun < 2.0
        assert str(error) == "rank 2 is lost"
        if hangs:
            assert registry.pending == ("forming 1/t",)
    until(lambda: registry.pending == (), "out")


def test_abort_all_ends_a_formation_too() -> None:
    registry, store = Registry(), stores(NAME, 2)[0]
    with fakes(1) as (backend,):
        results: list[BaseException | None] = []
        thread = threading.Thread(
            target=lambda: results.append(error_of(lambda: registry.form(backend, store, 0, 2, soon(30), tuple)))
        )
        thread.start()
        until(lambda: registry.pending != (), "forming")
        report = registry.abort_all(soon(), "the epoch is over")
        thread.join(5)
        assert report.returned == (NAME,)
        assert report.out
        assert "the epoch is over" in str(results[0])


@pytest.mark.parametrize("fault", list(Fault))
def test_abort(fault: Fault) -> None:
    """An operation is blocked; only what really let it go counts as out."""
    registries = [Registry(), Registry()]
    with fakes(2, [always("abort", fault), Faults()]) as backends:
        communicators = formed(backends, registries, NAME)
        thread, found = blocked(communicators[0], 1)
        begun = time.monotonic()
        report = registries[0].abort_all(soon(0.5), "user")
        assert time.monotonic() - begun < 3
        works = fault in (Fault.NONE, Fault.SLOW)
        assert report.out is works
        if works:
            thread.join(5)
            assert "communicator 1/t was aborted: user" in str(found[0])
            assert report == type(report)((NAME,), returned=(NAME,))
            assert registries[0].pending == ()
        else:
            kind = {Fault.HANG: report.stuck, Fault.RAISE: report.raised, Fault.NOTHING: report.busy}[fault]
            assert len(kind) == 1
            assert "1/t" in report.why
            assert registries[0].pending == ("communicator 1/t",)
            assert thread.is_alive()
        with pytest.raises(TransferError, match="was aborted: user"):
            communicators[0].network.send(1, torch.zeros(1, dtype=torch.uint8))
        again = registries[0].abort_all(soon(0.1), "again")  # the one call is not made twice
        assert sum(n for (call, _), n in backends[0].faults.counts.items() if call == "abort") == 1
        assert again.out is works
        communicators[0].free()
        thread.join(5)
        if fault is Fault.NOTHING:  # it has come out after all
            assert registries[0].pending == ()
        registries[1].abort_all(soon(), "end")


@pytest.mark.long
def test_counts_add_up_over_200_seeded_aborts() -> None:
    """Every hang becomes a named one in bounded time; not one is counted twice or not at all."""
    rates = {"abort": {Fault.HANG: 0.2, Fault.RAISE: 0.1, Fault.NOTHING: 0.1, Fault.SLOW: 0.1}}
    faults, registry = Faults(rates, seed=5, slow=0.02), Registry()
    counted: Counter[str] = Counter()
    made: list[FakeCommunicator] = []
    backend = FakeBackend(faults)
    threads: list[threading.Thread] = []
    begun = time.monotonic()
    for epoch in range(4):
        fifty = [
            FakeCommunicator(backend, Name(epoch, f"t{i}"), 0, 2, SocketNetwork(0, 2, {}), tuple) for i in range(50)
        ]
        made += fifty
        for one in fifty:
            registry.adopt(one)
        # Each has a call inside, which only an abort that works ends.
        threads += [blocked(one, 1)[0] for one in fifty]
        report = registry.abort_all(soon(1.0), "seeded", [one.name for one in fifty])
        for kind in ("returned", "raised", "busy", "stuck"):
            counted[kind] += len(getattr(report, kind))
        assert sorted(report.asked) == sorted(one.name for one in fifty)
        assert report.out is (len(report.returned) == 50)
    assert time.monotonic() - begun < 60
    drawn = {fault: n for (call, fault), n in faults.counts.items() if call == "abort"}
    assert sum(drawn.values()) == 200
    assert counted == {
        "returned": drawn[Fault.NONE] + drawn[Fault.SLOW],
        "raised": drawn[Fault.RAISE],
        "busy": drawn[Fault.NOTHING],
        "stuck": drawn[Fault.HANG],
    }
    assert len(registry.pending) == 200 - counted["returned"]
    faults.released.set()
    for one in made:
        one.free()
    for thread in threads:
        thread.join(5)
    until(lambda: len(registry.pending) == drawn[Fault.RAISE], "only those that raised are left")


class Waits(FakeCommunicator):
    """Its abort returns only when the other communicator is marked as well."""

    other: FakeCommunicator

    def abort(self) -> None:
        until(lambda: self.other.marked, "the other is marked", 5.0)
        super().abort()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_are_marked_before_any_is_released(order: tuple[int, int]) -> None:
    backend, registry = FakeBackend(), Registry()
    two = [Waits(backend, Name(1, f"t{i}"), 0, 2, SocketNetwork(0, 2, {}), tuple) for i in range(2)]
    two[0].other, two[1].other = two[1], two[0]
    for i in order:
        registry.adopt(two[i])
    threads = [blocked(one, 1)[0] for one in two]
    begun = time.monotonic()
    report = registry.abort_all(soon(5), "both")
    assert report.out
    assert time.monotonic() - begun < 3
    for thread in threads:
        thread.join(5)


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("excluded", ["alive", "gone"])
def test_shrink(fault: Fault, excluded: str) -> None:
    """The last of three is excluded. Whatever a member's shrink does, all end in time, and the parent is aborted by all."""
    registries = [Registry() for _ in range(3)]
    with fakes(3, [Faults(), always("shrink", fault), Faults()]) as backends:
        parents = formed(backends, registries, NAME)
        if excluded == "gone":
            registries[2].abort_all(soon(), "its process ends")
        results = together(
            [lambda r=r: registries[r].shrink(parents[r], NEXT, [2], soon(0.8), 1.0) for r in range(2)]  # type: ignore[misc]
        )
        if fault in (Fault.NONE, Fault.SLOW):
            ring(results, 4)
            assert [(c.rank, c.size, c.name) for c in results] == [(0, 2, NEXT), (1, 2, NEXT)]
            assert [r.pending for r in registries[:2]] == [("communicator 2/t",)] * 2
        else:
            assert isinstance(results[0], TransferError)
        assert all(b.faults.counts["abort", Fault.NONE] == 1 for b in backends[:2])
        assert registries[2].close(parents[2], soon()).out  # its peers have left: by abort
        assert (
            backends[2].faults.counts["abort", Fault.NONE] == 1 or backends[2].faults.counts["close", Fault.NONE] == 1
        )
        for registry in registries:
            registry.abort_all(soon(0.2), "end")
        assert (registries[1].pending == ("shrinking to 2/t",)) == (fault is Fault.HANG)
        backends[1].faults.released.set()
        until(lambda: all(r.pending == () for r in registries), "out")


@pytest.mark.parametrize("fault", list(Fault))
def test_grow(fault: Fault) -> None:
    """Two members and a fresh one, whose part goes wrong."""
    registries = [Registry() for _ in range(3)]
    with fakes(3, [Faults(), Faults(), always("grow", fault)]) as backends:
        parents = formed(backends[:2], registries[:2], NAME)
        local = stores(NEXT, 3)
        calls = [lambda r=r: registries[r].grow(parents[r], local[r], 3, soon(0.8), 1.0) for r in range(2)]  # type: ignore[misc]
        calls.append(lambda: registries[2].join(backends[2], local[2], 2, 3, [2], soon(0.8), tuple))
        results = together(calls)
        if fault in (Fault.NONE, Fault.SLOW):
            ring(results, 4)
        else:
            assert [isinstance(r, TransferTimeout) for r in results[:2]] == [True, True]
        for registry in registries:
            registry.abort_all(soon(0.2), "end")
        assert (registries[2].pending != ()) == (fault is Fault.HANG)
        backends[2].faults.released.set()
        until(lambda: all(r.pending == () for r in registries), "out")


def test_a_child_does_not_inherit_an_abort_and_gets_its_own() -> None:
    registries = [Registry(), Registry()]
    with fakes(2) as backends:
        parents = formed(backends, registries, NAME)
        # The child was made behind the registry's back.
        children = together([lambda p=p: p.shrink(NEXT, [], soon()) for p in parents])  # type: ignore[misc]
        report = registries[0].abort_all(soon(), "all", [NAME])
        assert set(report.returned) == {NAME, NEXT}
        assert children[0].marked
        registries[1].abort_all(soon(), "all")


@pytest.mark.parametrize("how", ["told", "evidence", "inside"])
def test_close_picks_abort_when_a_member_is_gone(how: str) -> None:
    """A farewell would wait for ever."""
    registries = [Registry(), Registry()]
    gone: list[int] = []
    with fakes(2, [always("close", Fault.HANG), Faults()]) as backends:
        local = stores(NAME, 2)
        communicators = together(
            [
                lambda r=r: registries[r].form(backends[r], local[r], r, 2, soon(), lambda: tuple(gone))  # type: ignore[misc]
                for r in range(2)
            ]
        )
        if how == "inside":
            thread, _ = blocked(communicators[0], 1)
        else:
            registries[1].close(communicators[1], soon())
        if how == "evidence":
            gone.append(1)
        begun = time.monotonic()
        report = registries[0].close(communicators[0], soon(5), [1] if how == "told" else ())
        assert time.monotonic() - begun < 2
        assert report.out
        assert backends[0].faults.counts["close", Fault.HANG] == 0
        if how == "inside":
            thread.join(5)
        registries[1].abort_all(soon(), "end")


def test_a_polite_close_that_hangs_is_named_and_an_abort_may_follow() -> None:
    registries = [Registry(), Registry()]
    with fakes(2, [always("close", Fault.HANG), Faults()]) as backends:
        communicators = formed(backends, registries, NAME)
        report = registries[0].close(communicators[0], soon(0.2))
        assert report.stuck == (NAME,)
        assert "did not return" in report.why
        again = registries[0].abort_all(soon(0.3), "it hangs")
        assert not again.out  # the close is still inside
        assert backends[0].faults.counts["abort", Fault.NONE] == 1
        backends[0].faults.released.set()
        until(lambda: registries[0].pending == (), "out")
        registries[1].abort_all(soon(), "end")


def test_a_name_is_used_once() -> None:
    registries = [Registry(), Registry()]
    with fakes(2) as backends:
        communicators = formed(backends, registries, NAME)
        again = formed(backends, registries, NAME)
        assert [isinstance(e, ProtocolError) for e in again] == [True, True]
        assert "1/t" in str(again[0])
        ring(communicators, 1)  # and the first one is unharmed
        for registry in registries:
            assert registry.abort_all(soon(), "end").out


def test_ends_of_unlike_communicators_refuse_each_other() -> None:
    """Names come from the coordinator; a member with another one, or another config, is named."""
    registries = [Registry(), Registry()]
    values: list[ControlStore] = []

    def told(other: int) -> object:
        return lambda key, value: values[other].feed({key: value})

    values += [ControlStore(Name(1, "a"), told(1)), ControlStore(Name(1, "b"), told(0))]  # type: ignore[arg-type]
    with fakes(2) as backends:
        errors = together(
            [lambda r=r: registries[r].form(backends[r], values[r], r, 2, soon(3), tuple) for r in range(2)]  # type: ignore[misc]
        )
    assert any(isinstance(e, PeerRefused) for e in errors)
    assert all(isinstance(e, TransferError) for e in errors)


def test_an_end_of_a_connection_frees_every_queued_waiter_by_name() -> None:
    registries = [Registry() for _ in range(4)]
    with fakes(4) as backends:
        communicators = formed(backends, registries, NAME)
        buffers = torch.zeros(4, 5, 64, dtype=torch.uint8)
        queued = {r: [communicators[r].network.receive(1, buffers[r, i]) for i in range(5)] for r in (0, 2, 3)}
        errors: list[BaseException | None] = []

        def waits(pending: Sequence[Pending]) -> None:
            errors.extend([error_of(lambda p=p: p.wait(soon())) for p in pending])  # type: ignore[misc]

        many = [threading.Thread(target=waits, args=(pending,)) for pending in queued.values()]
        for thread in many:
            thread.start()
        until(lambda: all(communicators[r].busy for r in queued), "all wait")
        communicators[1].free()
        for thread in many:
            thread.join(5)
        assert [isinstance(e, PeerLost) and e.members for e in errors] == [(1,)] * 15
        used = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - used < 0.1  # nobody spins
        for registry in registries:
            registry.abort_all(soon(), "end")


def walk(backends: list[FakeBackend], steps: list[str], lost_at: dict[int, str]) -> list[str]:
    """Members by letter go from step to step; each is one process with one registry."""
    registries = {m: Registry() for m in "abcdef"}
    held: dict[str, Communicator | None] = dict.fromkeys("abcdef")
    ways = []
    capabilities = backends[0].capabilities
    current = ""
    for number, wanted in enumerate(steps):
        lost = set(lost_at.get(number, ""))
        for member in lost:
            assert registries[member].abort_all(soon(), "killed").out
            held[member] = None
        choice = choose(tuple(current), tuple(wanted), lost, capabilities)
        ways.append(choice.way.value)
        name = Name(number, "t")
        local = dict(zip(wanted, stores(name, len(wanted)), strict=True))
        takes_part = sorted((set(current) | set(wanted)) - lost)

        def go(m: str, choice=choice, wanted=wanted, local=local, name=name) -> Communicator | None:  # type: ignore[no-untyped-def]
            store = local.get(m) or ControlStore(name)
            index = "abcdef".index(m)
            return change(registries[m], backends[index], held[m], choice, m, tuple(wanted), store, soon(5), 2.0, tuple)

        found = together([lambda m=m: go(m) for m in takes_part])  # type: ignore[misc]
        held.update(zip(takes_part, found, strict=True))
        assert [m for m in takes_part if held[m] is not None] == sorted(wanted)
        ring([held[m] for m in wanted], number)  # type: ignore[misc]
        current = wanted
    for registry in registries.values():
        assert registry.abort_all(soon(), "end").out
        assert registry.pending == ()
    return ways


STEPS, LOST = ["abc", "abc", "ac", "acd", "ca", "ab", "abef", "ae"], {5: "c", 7: "bf"}


def test_members_come_and_go_the_native_way() -> None:
    with fakes(6) as backends:
        assert walk(backends, STEPS, LOST) == ["anew", "keep", "shrink", "grow", "anew", "anew", "grow", "anew"]


def test_members_come_and_go_without_native_ways() -> None:
    with fakes(6, capabilities=Capabilities()) as backends:
        assert set(walk(backends, STEPS, LOST)) == {"anew", "keep"}


def test_faults_are_drawn_alike_for_one_seed() -> None:
    rates = {"abort": {Fault.RAISE: 0.3, Fault.NOTHING: 0.3}}

    def draws(seed: int) -> list[str]:
        faults = Faults(rates, seed)
        return [
            str(error_of(lambda: faults.suffer("abort"))) + str(faults.counts["abort", Fault.NONE]) for _ in range(50)
        ]

    assert draws(1) == draws(1) != draws(2)


def test_big_messages_out_of_order_and_unlike_sizes() -> None:
    registries = [Registry(), Registry()]
    with fakes(2) as backends:
        a, b = (c.network for c in formed(backends, registries, NAME))
        sizes = [3_000_000, 1, 0, 70_000]
        sent = [(torch.arange(n) % 251).to(torch.uint8) for n in sizes]
        into = [torch.zeros(n, dtype=torch.uint8) for n in sizes]

        def say() -> None:
            first = a.reserve(1, 4, 0)[0]
            for one in [a.send(1, sent[i], first + i) for i in (2, 0, 3, 1)]:
                one.wait(soon())

        def hear() -> None:
            for one in [b.receive(0, part) for part in into]:
                one.wait(soon())

        assert together([say, hear]) == [None, None]
        assert all(torch.equal(x, y) for x, y in zip(sent, into, strict=True))
        a.send(1, torch.zeros(5, dtype=torch.uint8))
        error = error_of(lambda: b.receive(0, torch.zeros(4, dtype=torch.uint8)).wait(soon(5)))
        assert "5 bytes where 4 were expected" in str(error)
        for registry in registries:
            assert registry.abort_all(soon(), "end").out
    assert isinstance(error, ReshardError)
