"""The doctor's judgement: findings from facts, each with what to do. Pure; nothing is said that was not measured or read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from elastic_reshard.doctor.facts import Facts, Finding
from elastic_reshard.doctor.judge_gpu import judge_gpus

__all__ = ["judge"]

_LONGEST_SOCKET: Final = 107  # bytes of a Unix socket's path
_FEW_FILES: Final = 4096  # a supervisor needs one a host, a watchdog one an arena and member
_LITTLE: Final = 1 << 30  # bytes
_LAG: Final = 0.2  # seconds; a watchdog's beat is 0.25 s
_NETWORKED: Final = ("nfs", "nfs4", "cifs", "fuse", "9p", "lustre", "ceph", "gpfs")
_OLDEST_KERNEL: Final = (5, 4)  # pidfd_open 5.3; F_SEAL_FUTURE_WRITE 5.1


def judge(facts: Facts) -> list[Finding]:
    """All findings, in order of what depends on what."""
    return [
        *_system(facts), *_memory(facts), *_processes(facts), *_files(facts), *_network(facts), *_clock(facts),
        *_packages(facts), *judge_gpus(facts),
    ]  # fmt: skip


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _either(name: str, fault: str, ok: str, todo: str) -> Finding:
    return Finding(name, "bad", fault, todo) if fault else Finding(name, "ok", ok)


def _system(facts: Facts) -> Iterator[Finding]:
    said = f"Linux {facts.kernel}, Python {facts.python}, {facts.processors} processors"
    numbers = tuple(int(n) for n in re.findall(r"\d+", facts.kernel)[:2])
    if numbers and numbers < _OLDEST_KERNEL:
        yield Finding("system", "bad", said, "run on Linux 5.4 or newer: pidfds and memory seals are needed")
    else:
        yield Finding("system", "ok", said)


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    yield _either(
        "memfd", memory.memfd, "memory that outlives its maker",
        "allow memfd_create (a seccomp profile may forbid it); arenas are made of it",
    )  # fmt: skip
    if not memory.memfd:
        yield _either(
            "seals", memory.seals, "SHRINK and GROW, and new writers are kept out",
            "use a kernel of 5.1 or newer that seals memfds; without seals a peer could be ended by SIGBUS",
        )  # fmt: skip
    if memory.shm is None:
        yield Finding("/dev/shm", "warn", "is not there", "mount a tmpfs at /dev/shm: torch and NCCL want it")
    elif memory.shm < _LITTLE:
        yield Finding(
            "/dev/shm", "warn", f"has {_gib(memory.shm)}",
            "arenas do not lie in it, but NCCL's and torch's buffers do: give the container an emptyDir of medium Memory there",
        )  # fmt: skip
    else:
        yield Finding("/dev/shm", "ok", f"has {_gib(memory.shm)}")
    free = memory.available
    if memory.limit is not None:
        free = min(free, memory.limit - memory.used)
    limit = f" (the container may have {_gib(memory.limit)})" if memory.limit is not None else ""
    said = f"{_gib(max(0, free))} can still be had{limit}"
    if free < _LITTLE:
        yield Finding(
            "memory", "warn", said,
            "arenas count as memory of the container: a source needs twice its shards in wire dtype; raise the limit",
        )  # fmt: skip
    else:
        yield Finding("memory", "ok", said)


def _processes(facts: Facts) -> Iterator[Finding]:
    found = facts.processes
    yield _either(
        "pidfd", found.pidfd, "a process's end is seen, and proved",
        "allow pidfd_open and pidfd_send_signal (seccomp); without them nobody can be condemned",
    )  # fmt: skip
    yield _either(
        "descriptors between processes", found.pass_fds, "are passed, and opened anew for reading",
        "processes of one host must share user, /proc and kernel, and be allowed SCM_RIGHTS; else give each container a host "
        "label of its own",
    )  # fmt: skip
    if found.vm_read:
        scope = "" if found.yama is None else f"; kernel.yama.ptrace_scope is {found.yama}"
        yield Finding(
            "process_vm_readv", "warn", f"{found.vm_read}{scope}",
            "nothing of the package needs it; for py-spy and gdb give the container SYS_PTRACE",
        )  # fmt: skip
    else:
        yield Finding("process_vm_readv", "ok", "stacks of other processes can be read by tools such as py-spy")
    if found.user_namespaces:
        yield Finding(
            "user namespaces", "ok", f"none for this user ({found.user_namespaces}); only this package's tests use them"
        )
    else:
        yield Finding("user namespaces", "ok", "this user may make them; only this package's tests do")


def _files(facts: Facts) -> Iterator[Finding]:
    found = facts.descriptors
    if found.hard < _FEW_FILES:
        yield Finding(
            "open files", "bad", f"at most {found.hard} a process",
            "raise the hard limit (LimitNOFILE=, ulimit -Hn) to 65536: a supervisor needs one a host, a watchdog one an arena",
        )  # fmt: skip
    else:
        yield Finding(
            "open files", "ok", f"{found.soft} a process, {found.hard} at most; watchdogs and supervisors take the most"
        )
    runtime = facts.runtime
    set_it = "set ELASTIC_RESHARD_RUNTIME to another folder"
    if runtime.fault:
        yield Finding("runtime folder", "bad", runtime.fault, f"{set_it}, of this user and mode 0700")
    elif runtime.longest > _LONGEST_SOCKET:
        yield Finding(
            "runtime folder", "bad", f"{runtime.path}: a socket in it would have a path of {runtime.longest} bytes",
            f"{set_it} with a shorter path: {_LONGEST_SOCKET} bytes are the most",
        )  # fmt: skip
    elif runtime.kind.startswith(_NETWORKED):
        yield Finding(
            "runtime folder", "warn", f"{runtime.path} is on {runtime.kind}",
            f"{set_it} on a local file system: sockets and locks of one machine are in it",
        )  # fmt: skip
    elif runtime.free < 64 << 20:
        yield Finding(
            "runtime folder", "warn", f"{runtime.path} has {runtime.free >> 20} MiB left", "free some: logs go there"
        )
    else:
        yield Finding("runtime folder", "ok", f"{runtime.path} on {runtime.kind}")


def _network(facts: Facts) -> Iterator[Finding]:
    found = facts.network
    there = ", ".join(found.candidates) or "none"
    if found.fault:
        yield Finding("network", "bad", found.fault, f"set ELASTIC_RESHARD_INTERFACE to one of: {there}")
    elif found.loopback:
        yield Finding(
            "network", "warn", f"others would reach this machine by {found.chosen}; it has {there}",
            "for a job on several machines set ELASTIC_RESHARD_INTERFACE to one that they reach; one machine needs none",
        )  # fmt: skip
    else:
        by = f", by {found.named}" if found.named else ""
        yield Finding("network", "ok", f"movers are reached by {found.chosen}{by}")
    low, high = found.ports
    if found.port_taken:
        yield Finding(
            "supervisor's port", "warn", f"{found.port}: {found.port_taken}",
            "a supervisor that runs here is a reason; else start it with --port N",
        )  # fmt: skip
    else:
        yield Finding("supervisor's port", "ok", f"{found.port} is free")
    if high - low < 1000:
        yield Finding(
            "ports of movers", "warn", f"only {low} to {high} are given out",
            "widen net.ipv4.ip_local_port_range: each mover listens at one, and has one for each peer",
        )  # fmt: skip
    else:
        yield Finding("ports of movers", "ok", f"from {low} to {high}: open them between the hosts of a job")


def _clock(facts: Facts) -> Iterator[Finding]:
    lag = facts.clock.lag
    said = f"a sleep of 10 ms came up to {1000 * lag:.0f} ms late"
    if lag > _LAG:
        yield Finding(
            "clock", "warn", said,
            "this machine is overloaded or throttled (cgroup cpu.max): raise the limit, or the deadlines that count beats",
        )  # fmt: skip
    else:
        yield Finding("clock", "ok", f"monotonic; {said}")


def _packages(facts: Facts) -> Iterator[Finding]:
    for name, what in (("torch", "members and movers need it"), ("ray", "only jobs on Ray need it")):
        version = facts.packages.get(name, "")
        if version:
            yield Finding(name, "ok", version)
        elif name == "torch":
            yield Finding(name, "bad", "is not installed", f"pip install torch: {what}")
        else:
            yield Finding(name, "ok", f"is not installed; {what}")
    torch = facts.packages.get("torch", "")
    numbers = tuple(int(n) for n in re.findall(r"\d+", torch)[:2])
    if numbers and numbers < (2, 11):
        yield Finding("torch's version", "warn", torch, "2.11 is the oldest that this package is tested with")
