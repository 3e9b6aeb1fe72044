"""Networks that a test can cut: sites in network namespaces of their own, each with one link for control and one for data.

    with Networks(["left", "right"]) as networks:
        world.sites["b"] = networks.site("right")
        networks.cut("right", DATA)

A hub namespace holds a bridge per kind of link, and the supervisor; the test's own thread is inside it as long as the
networks are there. Everything is gone with them, but for processes that still are in one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from multiprocessing import forkserver
from types import TracebackType
from typing import Final, Self

from elastic_reshard import interfaces

__all__ = ["CONTROL", "DATA", "HUB", "Networks", "enter", "missing"]

CONTROL: Final = "control"
DATA: Final = "data"
# Addresses for measuring networks (RFC 2544), which are nobody's; and seen inside the namespaces only.
_NETS: Final = {CONTROL: "198.18.0", DATA: "198.19.0"}
HUB: Final = f"{_NETS[CONTROL]}.1"  # where the supervisor listens
_CLONE_NEWNET: Final = 0x40000000
_OWN: Final = "/proc/thread-self/ns/net"


def missing() -> str:
    """What is missing here for networks of a test's own; "" if nothing is."""
    if shutil.which("ip") is None:
        return "`ip` of iproute2 is not installed"
    name = f"er-{os.getpid()}-try"
    tried = _try("ip", "netns", "add", name)
    if tried:
        return f"network namespaces can't be made: {tried}"
    made = _try("ip", "-n", name, "link", "add", "bridge", "type", "bridge") or _try(
        "ip", "-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other"
    )
    _ip("netns", "del", name)
    return made and f"veth pairs and bridges can't be made: {made}"


def enter(network: str) -> None:
    """This thread, and what it starts from now on, is in the namespace of that file. OSError if that is not allowed."""
    fd = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", network)
    finally:
        os.close(fd)


def _try(*what: str) -> str:
    done = subprocess.run(what, capture_output=True, text=True, check=False)
    return done.stderr.strip() or f"it ended with {done.returncode}" if done.returncode else ""


def _run(*what: str) -> None:
    wrong = _try(*what)
    assert not wrong, f"{' '.join(what)}: {wrong}"


def _ip(*what: str) -> None:
    _run("ip", *what)


def _clear_dead() -> None:
    """Remove namespaces of test runs that were killed."""
    for name in os.listdir("/run/netns") if os.path.isdir("/run/netns") else ():
        kind, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if kind == "er" and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _ip("netns", "del", name)


class Networks:
    """Namespaces by the names of the sites. Use it as a context manager, in the main thread."""

    def __init__(self, sites: Sequence[str]) -> None:
        self._sites = tuple(sites)
        self._made: list[str] = []
        self._home = -1

    def file(self, site: str = "hub") -> str:
        """Of a site's namespace, or of the hub's."""
        return f"/run/netns/{self._name(site)}"

    def environ(self) -> dict[str, str]:
        """Of members: movers meet over the link for data."""
        return {interfaces.VARIABLE: DATA}

    def cut(self, site: str, link: str) -> None:
        """From now on nothing gets through, in either direction; nobody is told."""
        _ip("-n", self._name("hub"), "link", "set", self._port(site, link), "down")

    def heal(self, site: str, link: str) -> None:
        """It is as before."""
        _ip("-n", self._name("hub"), "link", "set", self._port(site, link), "up")

    def limit(self, site: str, link: str, rate: str) -> None:
        """What goes to the site gets through at this rate ("64mbit")."""
        device = self._port(site, link)
        _run("tc", "-n", self._name("hub"), "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "64kb",
             "latency", "200ms")  # fmt: skip

    def unlimit(self, site: str, link: str) -> None:
        """It is as before."""
        _run("tc", "-n", self._name("hub"), "qdisc", "del", "dev", self._port(site, link), "root")

    def __enter__(self) -> Self:
        # It is kept for all tests, and so must not be born in here.
        forkserver.ensure_running()
        _clear_dead()
        self._home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._build()
            enter(self.file())
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        enter(f"/proc/self/fd/{self._home}")
        self._clear()

    def _build(self) -> None:
        hub = self._add("hub")
        for link, net in _NETS.items():
            _ip("-n", hub, "link", "add", link, "type", "bridge")
            _ip("-n", hub, "address", "add", f"{net}.1/24", "dev", link)
            _ip("-n", hub, "link", "set", link, "up")
        for number, site in enumerate(self._sites):
            name = self._add(site)
            for link, net in _NETS.items():
                port = self._port(site, link)
                _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", link, "netns", name)
                _ip("-n", hub, "link", "set", port, "master", link, "up")
                _ip("-n", name, "address", "add", f"{net}.{10 + number}/24", "dev", link)
                _ip("-n", name, "link", "set", link, "up")

    def _add(self, site: str) -> str:
        name = self._name(site)
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")
        return name

    def _clear(self) -> None:
        while self._made:
            _ip("netns", "del", self._made.pop())
        os.close(self._home)

    def _name(self, site: str) -> str:
        return f"er-{os.getpid()}-{site}"

    def _port(self, site: str, link: str) -> str:
        return f"{link[0]}-{site}"  # at most 15 letters
