"""In which order the NCCL backend calls its library, by a double of nccl4py that counts calls: no byte moves, nobody greets.
With NCCL itself: test_grouped, on a GPU."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_reshard.arena.pretend import open_pretend
from elastic_reshard.communicator import ControlStore, Name, Registry, nccl
from elastic_reshard.communicator.grouped import GroupedCommunicator
from elastic_reshard.communicator.nccl import NcclBackend
from elastic_reshard.errors import PeerLost, ProtocolError, TransferError, TransferTimeout
from tests.communicator.world import error_of, soon, stores, together, until

NAME, NEXT, THIRD = Name(1, "t"), Name(2, "t"), Name(3, "t")
IN_PROGRESS = 7


class NCCLError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"status {status}")


class Double:
    """nccl.core and nccl.bindings.nccl in one. Everything is in progress for some polls; log: (thread, call, pointer)."""

    NCCLError = NCCLError

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.left: dict[int, int] = {}  # polls until a communicator's last call is taken up
        self.states: dict[int, int] = {}
        self.block: threading.Event | None = None  # what group_end waits for
        self._pointers = iter(range(0x1000, 0x100000, 0x10))
        self.configs: list[Any] = []
        self.UniqueId = SimpleNamespace(from_bytes=lambda raw: raw)
        self.Communicator = lambda ptr=0: Handle(self)
        self.NCCLConfig = lambda **fields: fields

    def begin(self, pointer: int, polls: int = 3) -> None:
        self.left[pointer] = polls

    def get_unique_id(self) -> bytes:
        return b"i" * 128

    def comm_get_async_error(self, pointer: int) -> int:
        assert pointer
        self.log.append(("state", pointer))
        if pointer in self.states:
            return self.states[pointer]
        self.left[pointer] -= 1
        return IN_PROGRESS if self.left[pointer] >= 0 else 0

    def get_error_string(self, status: int) -> str:
        return f"error {status}"

    def get_last_error(self, pointer: int) -> str:
        return "words of the library"

    def group_start(self) -> None:
        self.log.append(("group_start", 0))

    def group_end(self) -> None:
        if self.block is not None:
            self.block.wait(10)
        self.log.append(("group_end", 0))

    def send(self, *args: int) -> None:
        self.log.append(("send", args))

    def recv(self, *args: int) -> None:
        self.log.append(("recv", args))

    def comm_finalize(self, pointer: int) -> None:
        self.log.append(("finalize", pointer))
        self.begin(pointer)

    def comm_destroy(self, pointer: int) -> None:
        self.log.append(("destroy", pointer))

    def comm_abort(self, pointer: int) -> None:
        if self.block is not None:
            self.block.set()  # an abort frees what is blocked
        self.log.append(("abort", pointer))

    def calls(self) -> list[str]:
        return [name for name, _ in self.log if name != "state"]


class Handle:
    """nccl.core.Communicator."""

    def __init__(self, library: Double) -> None:
        self.library, self.ptr = library, 0

    def _made(self, config: Any) -> Handle:
        self.library.configs.append(config)
        child = Handle(self.library)
        # The pointer of a child is there only when its parent's call has been taken up.
        child.ptr = next(self.library._pointers)
        self.library.begin(child.ptr)
        return child

    def initialize(self, size: int, rank: int, unique: bytes, config: Any) -> None:
        self.library.log.append(("initialize", (size, rank, unique)))
        self.ptr = self._made(config).ptr

    def shrink(self, excluded: list[int], config: Any) -> Handle:
        self.library.log.append(("shrink", excluded))
        self.library.begin(self.ptr)
        return self._made(config)

    def get_unique_id(self) -> bytes:
        self.library.begin(self.ptr)
        return b"g" * 128

    def grow(self, size: int, unique: bytes | None, rank: int | None = None, config: Any = None) -> Handle:
        self.library.log.append(("grow", (size, unique, rank)))
        if self.ptr:
            self.library.begin(self.ptr)
        return self._made(config)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[Double]:
    """A double for each backend made, in order; one GPU for all unless a test says otherwise."""
    made: list[Double] = []

    def library() -> Any:
        made.append(Double())
        return nccl._Library(made[-1], made[-1], 23007)

    monkeypatch.setattr(nccl, "_library", library)
    monkeypatch.setattr(nccl, "nccl_config", lambda: "nccl=23007 nccl4py=0")
    monkeypatch.setattr(nccl, "_index_of", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(GroupedCommunicator, "greet", lambda self, deadline: None)
    for variable in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return made


def backends(count: int, devices: int = 1) -> list[NcclBackend]:
    return [NcclBackend(open_pretend(rank % devices), "lo") for rank in range(count)]


def form(
    made: list[NcclBackend], registries: list[Registry], local: list[ControlStore], seconds: float = 5.0
) -> list[Any]:
    size = len(local)
    return together(
        [lambda r=r: registries[r].form(made[r], local[r], r, size, soon(seconds), tuple) for r in range(len(made))]  # type: ignore[misc]
    )


def test_it_forms_in_progress_and_ends_politely(libraries: list[Double]) -> None:
    made, registries = backends(2), [Registry(), Registry()]
    communicators = form(made, registries, stores(NAME, 2))
    for rank, (double, communicator) in enumerate(zip(libraries, communicators, strict=True)):
        assert double.calls() == ["initialize"]
        assert double.log[0] == ("initialize", (2, rank, b"i" * 128))
        assert sum(name == "state" for name, _ in double.log) >= 4  # it asked until it was taken up
        assert double.configs == [{"blocking": False, "max_ctas": 4}]  # they share a GPU
        assert communicator.config.endswith("max_ctas=4")
        assert registries[rank].close(communicator, soon()).out
        assert double.calls() == ["initialize", "finalize", "destroy"]
        last = double.log[-1]
        time.sleep(0.01)
        assert double.log[-1] == last  # nothing after the end


def test_ranks_on_gpus_of_their_own_have_no_limit_and_a_switch_is_respected(
    libraries: list[Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    registries = [Registry(), Registry()]
    form(backends(2, devices=2), registries, stores(NAME, 2))
    assert [d.configs for d in libraries] == [[{"blocking": False}]] * 2
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    errors = form(backends(2), [Registry(), Registry()], stores(NEXT, 2))
    assert all(isinstance(e, ProtocolError) and "ranks [0, 1] share GPU pretend:0" in str(e) for e in errors)
    assert [d.calls() for d in libraries[2:]] == [[], []]  # refused before anything was called
    for registry in registries:
        assert registry.abort_all(soon(), "end").out


def test_a_group_is_launched_whole_and_an_error_of_the_library_is_told(libraries: list[Double]) -> None:
    registry = Registry()
    (communicator,) = form(backends(1), [registry], stores(NAME, 1))
    double, piece = libraries[0], open_pretend(0).scratch(100).strided(0, (100,), (1,), 1)
    network: Any = communicator.network
    network.exchange([(3, piece)], [(2, piece)], soon())
    pointer, stream = double.log[0][1], network.stream.handle
    assert double.calls()[1:] == ["group_start", "recv", "send", "group_end"]
    sent = dict(double.log)["send"]
    assert sent == (piece.address, 100, 1, 3, communicator._native._made.ptr, stream)
    assert pointer is not None
    double.states[communicator._native._made.ptr] = 6  # ncclRemoteError
    error = error_of(lambda: network.exchange([(3, piece)], [], soon()))
    assert isinstance(error, PeerLost)
    assert error.members == (3,)
    assert "error 6; words of the library" in str(error)
    assert registry.close(communicator, soon()).out
    assert double.calls()[-1] == "abort"  # no polite end after an error
    assert "finalize" not in double.calls()


@pytest.mark.parametrize("ends", ["close", "abort"])
def test_after_its_end_nothing_that_a_group_reached_is_held(libraries: list[Double], ends: str) -> None:
    """The last groups' memory, staging or a mapped arena, would stay as long as the communicator is known."""
    registry = Registry()
    (communicator,) = form(backends(1), [registry], stores(NAME, 1))
    memory = open_pretend(0).scratch(100)
    piece = memory.strided(0, (100,), (1,), 1)
    communicator.network.exchange([(3, piece)], [(2, piece)], soon()).wait(soon())
    assert communicator._native._held == [piece, piece], "a kernel may still reach it"
    report = registry.close(communicator, soon()) if ends == "close" else registry.abort_all(soon(), "test")
    assert report.out
    assert libraries[0].calls()[-1] == ("destroy" if ends == "close" else "abort")
    assert communicator._native._held == []


def test_an_abort_goes_over_a_call_that_is_blocked(libraries: list[Double]) -> None:
    registry = Registry()
    (communicator,) = form(backends(1), [registry], stores(NAME, 1))
    double, piece = libraries[0], open_pretend(0).scratch(8).strided(0, (8,), (1,), 1)
    double.block = threading.Event()
    found: list[BaseException | None] = []
    network: Any = communicator.network
    thread = threading.Thread(target=lambda: found.append(error_of(lambda: network.exchange([(1, piece)], [], soon()))))
    thread.start()
    until(lambda: communicator.busy == 1, "it is inside")
    report = registry.abort_all(soon(5), "member 1 is lost")
    thread.join(5)
    assert report.out
    assert "communicator 1/t was aborted: member 1 is lost" in str(found[0])
    assert double.calls()[-2:] == ["abort", "group_end"]
    assert ("state", communicator._native._made.ptr) not in double.log[
        double.log.index(("abort", communicator._native._made.ptr)) :
    ]


def test_a_formation_that_is_late_or_cancelled_is_aborted(
    libraries: list[Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Double, "comm_get_async_error", lambda self, pointer: IN_PROGRESS)
    registry, store = Registry(), stores(NAME, 1)[0]
    begun = time.monotonic()
    error = error_of(lambda: registry.form(backends(1)[0], store, 0, 1, soon(0.5), tuple))
    assert isinstance(error, TransferTimeout)
    assert 0.3 < time.monotonic() - begun < 3
    store = stores(NEXT, 1)[0]
    reason = TransferError("rank 1 is lost")
    threading.Timer(0.1, store.cancel, [reason]).start()
    assert error_of(lambda: registry.form(backends(1)[0], store, 0, 1, soon(30), tuple)) is reason
    until(lambda: registry.pending == (), "out")
    assert [d.calls() for d in libraries] == [["initialize", "abort"]] * 2


def test_shrink_and_grow_make_children_and_abort_parents(libraries: list[Double]) -> None:
    made, registries = backends(3), [Registry() for _ in range(3)]
    parents = form(made[:2], registries, stores(NAME, 2))
    smaller = together([lambda r=r: registries[r].shrink(parents[r], NEXT, [], soon(5), 5.0) for r in range(2)])  # type: ignore[misc]
    local = stores(THIRD, 3)
    grown = together(
        [lambda r=r: registries[r].grow(smaller[r], local[r], 3, soon(5), 5.0) for r in range(2)]  # type: ignore[misc]
        + [lambda: registries[2].join(made[2], local[2], 2, 3, [2], soon(5), tuple)]
    )
    assert [(c.rank, c.size, c.name) for c in grown] == [(r, 3, THIRD) for r in range(3)]
    ids = [next(args for name, args in double.log if name == "grow") for double in libraries]
    assert ids == [(3, b"g" * 128, None), (3, None, None), (3, b"g" * 128, 2)]
    assert [d.calls() for d in libraries] == [["initialize", "shrink", "abort", "grow", "abort"]] * 2 + [["grow"]]
    assert {str(config) for d in libraries for config in d.configs} == {str({"blocking": False, "max_ctas": 4})}
    for registry in registries:
        assert registry.abort_all(soon(), "end").out


def test_without_nccl_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProtocolError, match="pretend:0 is no GPU"):
        NcclBackend(open_pretend(0))

    def missing(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(nccl, "importlib", SimpleNamespace(import_module=missing))
    nccl._library.cache_clear()
    with pytest.raises(ProtocolError, match=r"install elastic-reshard\[gpu\]"):
        nccl.nccl_config()
