"""Which network interface a member is reached by: one setting for all backends, and no loopback between machines.

The choice is a pure function of what this machine has; the refusal one of what all members told.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_reshard.errors import ProtocolError

__all__ = ["VARIABLE", "Address", "Told", "addresses", "choose", "machine", "refuse_loopback", "resolved"]

VARIABLE = "ELASTIC_RESHARD_INTERFACE"
# Interfaces of containers and virtual machines: their addresses are mostly not reachable from elsewhere.
_INNER = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman")
_SIOCGIFADDR, _SIOCGIFFLAGS, _IFF_UP = 0x8915, 0x8913, 0x1


@dataclass(frozen=True, slots=True)
class Address:
    """One address of an interface of this machine; an IPv6 link-local one keeps its scope: "fe80::1%eth0"."""

    interface: str
    address: str

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def link_local(self) -> bool:
        """Whether it means something only together with an interface."""
        return ipaddress.ip_address(self.address).is_link_local

    def __str__(self) -> str:
        return f"{self.interface} ({self.address})"


@dataclass(frozen=True, slots=True)
class Told:
    """What a member tells the others before they connect. config: of its backend."""

    machine: str
    address: Address
    candidates: tuple[Address, ...]
    config: str

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def of(cls, raw: bytes) -> Told:
        """From `to_bytes`. ProtocolError for anything else."""
        try:
            data = json.loads(raw)
            candidates = tuple(Address(**c) for c in data["candidates"])
            return cls(str(data["machine"]), Address(**data["address"]), candidates, str(data["config"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"a member told {raw[:80]!r} instead of its machine and address ({error})") from error


def choose(wanted: str | None, found: Sequence[Address], host_addresses: Sequence[str]) -> Address:
    """The address by which this member is to be reached.

    wanted: an interface's name or one of its addresses, None for no wish; found: what this machine has; host_addresses: what
    its name resolves to. Without a wish: an address of the host's name, then any other that is not loopback, link-local
    ones last (with their scope); loopback if there is nothing else. ProtocolError, which names the variable and the
    candidates, if the wish is not there.
    """
    if wanted:
        for one in found:
            if wanted in (one.interface, one.address):
                return one
        raise ProtocolError(
            f"{VARIABLE}={wanted}: this machine has no such interface or address, or it is down; it has {_listed(found)}"
        )
    if not found:
        raise ProtocolError(f"this machine has no network interface that is up, not even loopback; set {VARIABLE}")
    named = set(host_addresses)

    def rank(one: Address) -> tuple[bool, bool, bool, bool]:
        inner = one.interface.startswith(_INNER)
        return one.loopback, one.link_local, one.address not in named, inner

    return min(found, key=rank)  # the first of equals


def refuse_loopback(told: Mapping[int, Told]) -> None:
    """Refuse a roster of several machines in which somebody would be reached by loopback. told: by rank.

    ProtocolError names the members, the variable, and the candidates of each.
    """
    if len({one.machine for one in told.values()}) <= 1:
        return
    faults = {
        rank: f"member {rank} would be reached by {one.address}; it has "
        f"{_listed([c for c in one.candidates if not c.loopback])}"
        for rank, one in sorted(told.items())
        if one.address.loopback
    }
    if faults:
        error = ProtocolError(
            f"members are on several machines and cannot reach each other by loopback: {'; '.join(faults.values())}. "
            f"Set {VARIABLE} on their machines to an interface or address that the others can reach"
        )
        error.members = tuple(faults)
        raise error


def _listed(found: Sequence[Address]) -> str:
    return ", ".join(map(str, found)) or "no other address"


def machine() -> str:
    """Equal for processes that reach each other by loopback: the machine's boot and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"


def resolved() -> list[str]:
    """Addresses of this machine's own name; empty if it does not resolve."""
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def addresses() -> list[Address]:
    """Addresses of the interfaces of this machine that are up, in the kernel's order."""
    found: list[Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            flags = _ask(asked, _SIOCGIFFLAGS, request)
            if flags is None or not struct.unpack_from("H", flags, 16)[0] & _IFF_UP:
                continue
            answer = _ask(asked, _SIOCGIFADDR, request)
            if answer is not None:
                found.append(Address(interface, socket.inet_ntoa(answer[20:24])))
            found += [Address(interface, address) for name, address in _ipv6() if name == interface]
    return found


def _ask(asked: socket.socket, what: int, request: bytes) -> bytes | None:
    buffer = array.array("B", request)
    try:
        fcntl.ioctl(asked.fileno(), what, buffer, True)
    except OSError:  # it has no IPv4 address, or has just gone
        return None
    return buffer.tobytes()


def _ipv6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return []
    found = []
    for line in lines:
        raw, *_, interface = line.split()
        address = ipaddress.IPv6Address(int(raw, 16))
        found.append((interface, f"{address}%{interface}" if address.is_link_local else str(address)))
    return found
