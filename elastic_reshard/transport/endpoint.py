"""An endpoint: one member's end of a group of members, with a network between domains and a channel inside its own.

Forming one is collective. Members find each other through a store that the caller gives; what they tell there (host,
process, listening address) decides the domains and the network interface.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from torch.distributed.distributed_c10d import PrefixStore, Store

from elastic_reshard.arena import DomainChannel, HostArena, Listener, connect_mesh
from elastic_reshard.errors import LayoutError, PeerLost, TransferError, TransferTimeout
from elastic_reshard.log import logger
from elastic_reshard.plan import Topology
from elastic_reshard.transport.network import GlooNetwork, Network
from elastic_reshard.transport.polling import whole_ms

__all__ = ["Endpoint", "Identity"]

_log = logger("transport")
# After a connection broke: how long to wait for the end of its process to show. 0.3 s is what freeing 1 GiB takes.
_EVIDENCE_S = 0.4
_FORMED = "formed"
_STUCK_S = 1.0


@dataclass(frozen=True, slots=True)
class Identity:
    """What a member tells the others of itself."""

    member: int
    host: str
    pid: int
    pid_space: str
    address: str
    domain: str

    @classmethod
    def mine(cls, member: int, listener: Listener, domain: str | None) -> Identity:
        """Of this process. Members share a host when kernel, network namespace and user are the same: then they can
        reach each other's Unix sockets and map each other's memory."""
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        host = f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.getuid()}"
        return cls(
            member,
            host,
            os.getpid(),
            f"{boot}/{os.readlink('/proc/self/ns/pid')}",
            listener.address.hex(),
            host if domain is None else domain,
        )


class Endpoint:
    """One member's end. Made by `form`; usable by one thread at a time; `close` it, or use `with`.

    After a TransferError it is closed by whoever saw the error, so that no peer goes on waiting: form a new one.
    """

    def __init__(
        self,
        rank: int,
        identities: Sequence[Identity],
        topology: Topology,
        network: Network | None,
        channel: DomainChannel,
        pidfds: Mapping[int, int],
    ) -> None:
        self.rank, self.size, self.topology = rank, len(identities), topology
        self.identities, self.channel = tuple(identities), channel
        self._network = network
        self._pidfds = dict(pidfds)
        self._staging: HostArena | None = None
        self.closed = False
        self.memo: dict[str, Any] = {}  # what the layer above keeps with the group; gone when it closes

    @classmethod
    def form(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        domains: Sequence[Hashable] | None = None,
        interface: str | None = None,
        timeout: float = 60.0,
        first_sequence: int = 0,
    ) -> Endpoint:
        """Form the group: collective over all `size` members, each with its own rank, the same store and prefix.

        domains: a label per member (equal on all); None: members of one host are one domain. Members with equal labels
        must be able to map each other's memory: LayoutError if they cannot.
        interface: network device for gloo; None: loopback when all members are on one host, else gloo's choice.
        Blocks about `timeout` seconds at most; TransferTimeout names members that did not come, PeerLost one that ended.
        """
        deadline = time.monotonic() + timeout
        if domains is not None and len(domains) != size:
            raise LayoutError(f"{len(domains)} domain labels for {size} members")
        label = None if domains is None else repr(domains[rank])
        pidfds: dict[int, int] = {}
        with Listener() as listener:
            me = Identity.mine(rank, listener, label)
            if rank == 0:
                store.set("secret", secrets.token_hex(32))
            everyone = _meet(store, me, size, deadline)
            secret = bytes.fromhex(store.get("secret").decode())
            topology = Topology.of([i.domain for i in everyone])
            _refuse_strangers(everyone)
            try:
                pidfds.update(_pidfds(me, everyone))
                single = len({i.host for i in everyone}) == 1
                network = None
                if size > 1:
                    remaining = max(0.1, deadline - time.monotonic())
                    device = interface if interface is not None else ("lo" if single else None)
                    network = GlooNetwork(
                        PrefixStore("gloo", store), rank, size, remaining, device,
                        lambda: _ended(pidfds, _EVIDENCE_S), first_sequence,
                    )  # fmt: skip
                near = {
                    i.member: bytes.fromhex(i.address) for i in everyone if i.domain == me.domain and i.member != rank
                }
                channel = connect_mesh(rank, near, listener, secret, deadline)
                # gloo calls a mesh formed when this end is: a peer that goes on and closes would break another's forming.
                _all_formed(store, rank, size, deadline, pidfds)
            except BaseException as error:
                _close_fds(pidfds)
                store.set(f"formed/{rank}", f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
                raise
        _log.info("endpoint.formed", member=rank, members=size, domains=len(set(topology.domains)))
        return cls(rank, everyone, topology, network, channel, pidfds)

    @property
    def network(self) -> Network:
        """The network to all other members. TransferError when the endpoint is closed or alone."""
        if self.closed or self._network is None:
            raise TransferError(f"the endpoint of member {self.rank} is closed or alone; form a new one")
        return self._network

    @property
    def domain_peers(self) -> tuple[int, ...]:
        """Other members of this member's domain."""
        return tuple(self.channel.peers)

    def ended(self, wait: float = 0.0) -> tuple[int, ...]:
        """Members whose processes have ended, as far as can be seen from here; waits up to `wait` s for the first."""
        return _ended(self._pidfds, wait)

    def stuck(self) -> tuple[int, ...]:
        """Members that have ended, if this member's network has waited for one message for a second all the same. Any
        thread."""
        since = self._network.waiting_since if self._network is not None else None
        if self.closed or since is None or time.monotonic() - since < _STUCK_S:
            return ()
        return self.ended()

    def staging(self, nbytes: int) -> HostArena:
        """Memory for what cannot go straight from tensor to tensor; kept, and made anew only to grow."""
        if self._staging is None or self._staging.nbytes < nbytes:
            self._staging = HostArena(nbytes, "staging")
        return self._staging

    def fail(self, error: BaseException) -> None:
        """Close after an error. A PeerLost that names members who only left because of another one's end is made to name
        that one, if its end can be seen from here; waits for that a moment (0.4 s)."""
        if isinstance(error, PeerLost) and not self.closed:
            ended = self.ended(_EVIDENCE_S)
            if ended and ended != error.members:
                error.members = ended
                error.args = (f"member {', '.join(map(str, ended))} ended; so {error.args[0]}",)
        self.close()

    def close(self) -> None:
        """Close every connection, descriptor and buffer. Idempotent; does not block. Peers that wait for this member
        get PeerLost."""
        if self.closed:
            return
        self.closed = True
        self.memo.clear()
        if self._network is not None:
            self._network.close()
        self.channel.close()
        self._staging = None
        _close_fds(self._pidfds)
        _log.info("endpoint.closed", member=self.rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _meet(store: Store, me: Identity, size: int, deadline: float) -> list[Identity]:
    """Tell who this member is, and read who the others are."""
    store.set(f"member/{me.member}", json.dumps(asdict(me)))
    keys = [f"member/{m}" for m in range(size)]
    try:
        store.wait(keys, whole_ms(deadline - time.monotonic()))
    except RuntimeError as error:  # DistStoreError is one
        missing = [m for m, key in enumerate(keys) if not store.check([key])]
        raise TransferTimeout(
            f"member(s) {missing} of {size} did not come to form the group in time; see whether they run, then form it "
            "anew under a new prefix",
            missing,
        ) from error
    return [Identity(**json.loads(store.get(key))) for key in keys]


def _all_formed(store: Store, rank: int, size: int, deadline: float, pidfds: Mapping[int, int]) -> None:
    """Tell that this end is formed, and wait until every member's is."""
    keys = [f"formed/{m}" for m in range(size)]
    store.set(keys[rank], _FORMED)
    while True:
        try:
            store.wait(keys, whole_ms(min(_EVIDENCE_S, deadline - time.monotonic())))
            break
        except RuntimeError as error:  # DistStoreError is one
            missing = [m for m, key in enumerate(keys) if not store.check([key])]
            gone = tuple(m for m in _ended(pidfds, 0.0) if m in missing)
            if gone:
                named = ", ".join(map(str, gone))
                raise PeerLost(f"member {named} ended while the group formed; form it anew without it", gone) from error
            if time.monotonic() >= deadline:
                raise TransferTimeout(
                    f"member(s) {missing} of {size} did not finish forming the group in time; see whether they are "
                    "frozen, and form it anew under a new prefix", missing,
                ) from error  # fmt: skip
    said = {m: store.get(key).decode() for m, key in enumerate(keys)}
    failed = tuple(m for m, what in said.items() if what != _FORMED)
    if failed:
        raise PeerLost(f"member {failed[0]} gave up while the group formed ({said[failed[0]]}); form it anew", failed)


def _refuse_strangers(everyone: Sequence[Identity]) -> None:
    hosts: dict[str, set[str]] = {}
    for i in everyone:
        hosts.setdefault(i.domain, set()).add(i.host)
    split = [domain for domain, found in hosts.items() if len(found) > 1]
    if split:
        raise LayoutError(
            f"domains {split} span several hosts, whose members cannot map each other's memory; label them apart"
        )


def _pidfds(me: Identity, everyone: Sequence[Identity]) -> dict[int, int]:
    """Descriptors that tell of a process's end, for those in the same process-id space. PeerLost for one that ended."""
    found: dict[int, int] = {}
    for i in everyone:
        if i.pid_space == me.pid_space and i.pid != me.pid:
            try:
                found[i.member] = os.pidfd_open(i.pid)
            except ProcessLookupError as error:
                _close_fds(found)
                raise PeerLost(
                    f"member {i.member} (process {i.pid}) came to form the group and has ended since; form it anew, under "
                    "a new prefix, without it or with a new one",
                    (i.member,),
                ) from error
    return found


def _ended(pidfds: Mapping[int, int], wait: float) -> tuple[int, ...]:
    poll = select.poll()
    member_of = {fd: member for member, fd in pidfds.items() if fd >= 0}
    for fd in member_of:
        poll.register(fd, select.POLLIN)
    if not member_of:
        return ()
    return tuple(sorted(member_of[fd] for fd, _ in poll.poll(max(0.0, wait) * 1000)))


def _close_fds(pidfds: dict[int, int]) -> None:
    for fd in pidfds.values():
        os.close(fd)
    pidfds.clear()
