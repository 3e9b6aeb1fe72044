"""Agreement before the first byte: every member tells every other a short header, and all see the same headers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from elastic_reshard.errors import PeerRefused, PlanMismatch
from elastic_reshard.transport import Endpoint

__all__ = ["Header", "all_told", "bodies", "exchange"]

_FORMAT = struct.Struct("<4sHHQ16s16s16s16s16sI160s")
_MAGIC = b"ERs1"
_READY, _REFUSED = 0, 1
_NEEDS_BIND = 1
_TOLD = 18  # tag on the domain channel


@dataclass(frozen=True, slots=True)
class Header:
    """What a member says when it enters a call. Ids are 16-byte digests.

    call: number of calls on this endpoint. source, destination: its fragments. options: how to plan. plan: the plan that
    it holds for what it believes is the same call (zeros: none). body: length of what it tells next. rebind: its tensors
    are not where they were. refused: why it cannot take part, empty if it can.
    """

    call: int
    source: bytes = bytes(16)
    destination: bytes = bytes(16)
    options: bytes = bytes(16)
    plan: bytes = bytes(16)
    key: bytes = bytes(16)
    body: int = 0
    rebind: bool = False
    refused: str = ""

    def pack(self) -> bytes:
        """As it travels: always the same size."""
        reason = self.refused.encode()[:160]
        status = _REFUSED if self.refused else _READY
        flags = _NEEDS_BIND if self.rebind else 0
        return _FORMAT.pack(
            _MAGIC, status, flags, self.call, self.source, self.destination, self.options, self.plan, self.key,
            self.body, reason,
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes, member: int) -> Header:
        """PlanMismatch for what is no header of this version."""
        magic, status, flags, call, source, destination, options, plan, key, body, reason = _FORMAT.unpack(raw)
        if magic != _MAGIC:
            raise PlanMismatch(f"member {member} speaks another version of this call; install the same one everywhere")
        text = reason.rstrip(b"\0").decode(errors="replace")
        return cls(call, source, destination, options, plan, key, body, bool(flags & _NEEDS_BIND),
                   text or "no reason given" if status == _REFUSED else "")  # fmt: skip


def exchange(endpoint: Endpoint, mine: bytes, sizes: Sequence[int], deadline: float) -> list[bytes]:
    """Tell `mine` to all, hear what each tells (sizes[m] bytes from member m). Collective; blocks until `deadline`;
    PeerLost or TransferTimeout name the member that was waited for. Inside a domain it goes by the channel, which costs a
    tenth of the network."""
    near = set(endpoint.domain_peers)
    far = [m for i in range(1, endpoint.size) if (m := (endpoint.rank + i) % endpoint.size) not in near]
    heard = {m: torch.empty(sizes[m], dtype=torch.uint8) for m in far}
    pending = [endpoint.network.receive(m, heard[m]) for m in far if sizes[m]]
    if mine:
        said = torch.from_numpy(np.frombuffer(bytearray(mine), dtype=np.uint8))
        pending += [endpoint.network.send(m, said) for m in far]
        for m in endpoint.domain_peers:
            endpoint.channel.send(m, _TOLD, mine, deadline=deadline)
    found = {endpoint.rank: mine}
    for m in endpoint.domain_peers:
        found[m] = endpoint.channel.take(m, _TOLD, deadline=deadline, strict=False).payload if sizes[m] else b""
        if len(found[m]) != sizes[m]:
            raise PlanMismatch(
                f"member {m} told {len(found[m])} bytes instead of {sizes[m]}; install one version everywhere"
            )
    for one in pending:
        one.wait(deadline)
    found |= {m: told.numpy().tobytes() for m, told in heard.items()}
    return [found[m] for m in range(endpoint.size)]


def all_told(endpoint: Endpoint, header: Header, deadline: float) -> list[Header]:
    """Every member's header. PeerRefused if one cannot take part, PlanMismatch if they are not in the same call."""
    raw = exchange(endpoint, header.pack(), [_FORMAT.size] * endpoint.size, deadline)
    headers = [Header.unpack(r, m) for m, r in enumerate(raw)]
    for member, h in enumerate(headers):
        if h.refused and member != endpoint.rank:
            raise PeerRefused(member, h.refused)
    calls = {m: h.call for m, h in enumerate(headers) if h.call != header.call}
    if calls:
        raise PlanMismatch(
            f"member {endpoint.rank} is in call {header.call} of this group, members {calls} are in others; "
            "every member must make the same calls in the same order"
        )
    return headers


def bodies(endpoint: Endpoint, headers: Sequence[Header], mine: bytes, deadline: float) -> list[bytes]:
    """What each member tells after its header."""
    return exchange(endpoint, mine, [h.body for h in headers], deadline)
