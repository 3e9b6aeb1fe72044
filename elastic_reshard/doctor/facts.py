"""What is known of a machine, as plain data: gathered by `gather.py` and `gpu.py`, judged by `judge.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = [
    "Clock",
    "Descriptors",
    "Facts",
    "Finding",
    "Gpu",
    "Gpus",
    "Mark",
    "Memory",
    "Network",
    "Processes",
    "Runtime",
]

Mark = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report. todo: what to do; "" if it is ok."""

    name: str
    mark: Mark
    said: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """memfd, seals: "" if sealed memfds work and keep what is mapped readable, else why not. shm: bytes of /dev/shm, None if it
    is not there. available: bytes that processes can still get; limit, used: of the container (cgroup), limit None for none."""

    memfd: str = ""
    seals: str = ""
    shm: int | None = 0
    available: int = 0
    limit: int | None = None
    used: int = 0


@dataclass(frozen=True, slots=True)
class Processes:
    """pidfd, vm_read, pass_fds: "" if a process's end can be watched, a child's memory read, and a descriptor passed and opened
    anew; else why not. yama: ptrace_scope, None if the kernel has none. user_namespaces: whether this user may make one."""

    pidfd: str = ""
    vm_read: str = ""
    pass_fds: str = ""
    yama: int | None = None
    user_namespaces: str = ""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Open files that a process may have, now and at most."""

    soft: int = 1 << 20
    hard: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Runtime:
    """The runtime folder. fault: why it cannot be used, else "". longest: bytes of the longest path that a socket gets in it.
    free: bytes. kind: its file system."""

    path: str = ""
    fault: str = ""
    longest: int = 0
    free: int = 1 << 40
    kind: str = "tmpfs"


@dataclass(frozen=True, slots=True)
class Network:
    """chosen: by which others reach this machine, "" if `fault`. loopback: whether that is loopback. candidates: all that there
    are. named: the variable that chose, "" for none. port_taken: who cannot listen at the usual port, "" if it is free.
    ports: the range from which the system gives free ports."""

    chosen: str = ""
    fault: str = ""
    loopback: bool = False
    candidates: tuple[str, ...] = ()
    named: str = ""
    port: int = 29700
    port_taken: str = ""
    ports: tuple[int, int] = (32768, 60999)


@dataclass(frozen=True, slots=True)
class Clock:
    """resolution: seconds of the monotonic clock. lag: the most by which ten sleeps of 10 ms came late, in seconds."""

    resolution: float = 1e-9
    lag: float = 0.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. fabric: "" if it is in none, else its state; cluster, clique: of a fabric."""

    uuid: str
    name: str
    memory: int = 0
    mig: bool = False
    fabric: str = ""
    cluster: str = ""
    clique: int = 0


@dataclass(frozen=True, slots=True)
class Gpus:
    """absent: why nothing is known of GPUs; "" if something is. driver: its version; cuda: the newest that it serves. apart:
    pairs of GPUs (by index) that cannot read each other's memory. mps: processes of a CUDA MPS daemon that runs."""

    absent: str = "no NVIDIA driver on this machine"
    driver: str = ""
    cuda: str = ""
    found: tuple[Gpu, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    mps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything. packages: versions of installed ones by name, "" for those that are not. python, kernel: versions.

    nccl: the version that the library itself says it has, "" if it could not be asked."""

    kernel: str = ""
    python: str = ""
    processors: int = 1
    memory: Memory = field(default_factory=Memory)
    processes: Processes = field(default_factory=Processes)
    descriptors: Descriptors = field(default_factory=Descriptors)
    runtime: Runtime = field(default_factory=Runtime)
    network: Network = field(default_factory=Network)
    clock: Clock = field(default_factory=Clock)
    gpus: Gpus = field(default_factory=Gpus)
    packages: dict[str, str] = field(default_factory=dict)
    nccl: str = ""

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)
