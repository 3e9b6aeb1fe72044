"""The doctor's eyes: asks this machine, and decides nothing. What cannot be asked says why."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib.metadata
import mmap
import os
import platform
import shutil
import socket
import stat
import time
from pathlib import Path
from typing import Final

from elastic_reshard.doctor.facts import Clock, Descriptors, Facts, Memory, Network, Processes, Runtime
from elastic_reshard.doctor.gpu import gather_gpus, nccl_version
from elastic_reshard.errors import ProtocolError
from elastic_reshard.interfaces import VARIABLE, addresses, choose, resolved
from elastic_reshard.watchdog.runtime import runtime_folder

__all__ = ["gather"]

_PACKAGES: Final = (
    "elastic-reshard", "torch", "ray", "numpy", "pydantic", "fastapi", "uvicorn", "websockets", "nccl4py", "nccl-extensions",
    "cuda-bindings", "nvidia-ml-py", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "vllm", "sglang",
)  # fmt: skip
_SEAL_FUTURE_WRITE: Final = 0x0010  # F_SEAL_FUTURE_WRITE; not in Python's fcntl
_LONGEST_NAME: Final = 40 + 40 + len("//.sock.new")  # of a job and a host, in the runtime folder
_CGROUP: Final = Path("/sys/fs/cgroup")


def gather(runtime: Path | None = None, port: int = 29700) -> Facts:
    """Look at everything. Blocks for about half a second (0.1 s of it to see how late sleeps are). Changes nothing, leaves
    nothing behind."""
    return Facts(
        kernel=platform.release(), python=platform.python_version(), processors=os.cpu_count() or 1,
        memory=_memory(), processes=_processes(), descriptors=_descriptors(), runtime=_runtime(runtime),
        network=_network(port), clock=_clock(), gpus=gather_gpus(), packages=_packages(), nccl=nccl_version(),
    )  # fmt: skip


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _why(error: OSError) -> str:
    return f"{error.strerror or error} (errno {errno.errorcode.get(error.errno or 0, error.errno)})"


# -- memory


def _memory() -> Memory:
    memfd, seals = _sealed()
    shm: int | None
    try:
        shm = shutil.disk_usage("/dev/shm").total
    except OSError:
        shm = None
    limit, used = _cgroup()
    return Memory(memfd, seals, shm, _available(), limit, used)


def _sealed() -> tuple[str, str]:
    """Why memfds do not work, and why sealed ones do not."""
    try:
        fd = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {_why(error)}", ""
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        try:
            os.ftruncate(fd, 0)
        except PermissionError:
            return "", ""
        return "", "a sealed memfd could be shrunk"
    except OSError as error:
        return "", f"F_ADD_SEALS: {_why(error)}"
    finally:
        os.close(fd)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _cgroup() -> tuple[int | None, int]:
    """(limit, used) of this process's cgroup and those above it, versions 2 and 1; the tightest."""
    found: list[tuple[int, int]] = []
    for limit, used in (
        *_version_2(),
        (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            found.append((int(limit.read_text()), int(used.read_text())))
    found = [(limit, used) for limit, used in found if limit < 1 << 60]  # version 1 writes a huge number for none
    return min(found, key=lambda one: one[0] - one[1], default=(None, 0))


def _version_2() -> list[tuple[Path, Path]]:
    places = [_CGROUP]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = _CGROUP / line[3:].strip("/")
                places += [own, *(p for p in own.parents if p.is_relative_to(_CGROUP))]
    return [(place / "memory.max", place / "memory.current") for place in dict.fromkeys(places)]


# -- processes


def _processes() -> Processes:
    pidfd, vm_read = _child()
    yama: int | None = None
    with contextlib.suppress(OSError, ValueError):
        yama = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    return Processes(pidfd, vm_read, _pass_fds(), yama, _user_namespaces())


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


def _child() -> tuple[str, str]:
    """Why a child's end can't be watched, and why its memory can't be read. The child only waits."""
    reads, writes = os.pipe()
    buffer = ctypes.create_string_buffer(b"doctor", 8)
    pid = os.fork()
    if not pid:
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    os.close(reads)
    try:
        vm_read = _read_memory(pid, ctypes.addressof(buffer))
        try:
            os.close(os.pidfd_open(pid))
        except OSError as error:
            return f"pidfd_open: {_why(error)}", vm_read
        return "", vm_read
    finally:
        os.close(writes)
        os.waitpid(pid, 0)


def _read_memory(pid: int, address: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "this C library has no process_vm_readv"
    into = ctypes.create_string_buffer(8)
    mine, theirs = _Span(ctypes.addressof(into), 8), _Span(address, 8)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    read = libc.process_vm_readv(pid, ctypes.byref(mine), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1),
                                 ctypes.c_ulong(0))  # fmt: skip
    if read == 8 and into.raw[:6] == b"doctor":
        return ""
    return f"process_vm_readv: {_why(OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))}"


def _pass_fds() -> str:
    """Why a memfd can't go over a Unix socket and be opened anew for reading; "" if it can."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    kept: list[int] = []
    with ours, theirs:
        try:
            kept.append(os.memfd_create("doctor", os.MFD_CLOEXEC))
            socket.send_fds(ours, [b"x"], [kept[0]])
            _, passed, _, _ = socket.recv_fds(theirs, 1, 1)
            kept += passed
            kept.append(os.open(f"/proc/self/fd/{passed[0]}", os.O_RDONLY | os.O_CLOEXEC))
        except (OSError, IndexError) as error:
            return f"a descriptor could not be passed and opened anew: {error}"
        finally:
            for fd in kept:
                os.close(fd)
    return ""


def _user_namespaces() -> str:
    """Why this user can make none, as far as settings say; "" if it can."""
    for name, none in (("kernel/unprivileged_userns_clone", "0"), ("user/max_user_namespaces", "0")):
        with contextlib.suppress(OSError):
            if Path("/proc/sys", name).read_text().strip() == none:
                return f"{name.replace('/', '.')} is 0"
    return ""


def _descriptors() -> Descriptors:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 30
    return Descriptors(soft if soft >= 0 else most, hard if hard >= 0 else most)


# -- places


def _runtime(given: Path | None) -> Runtime:
    path = runtime_folder(given).absolute()
    longest = len(os.fsencode(path)) + _LONGEST_NAME
    # Names that would not fit are shortened to one of 16 digits, without the job's folder.
    if longest > 107:
        longest = len(os.fsencode(path)) + len("/.sock.new") + 16
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    fault = ""
    try:
        found = path.lstat() if path.exists() or path.is_symlink() else None
        if found is not None and not stat.S_ISDIR(found.st_mode):
            fault = f"{path} is no folder"
        elif found is not None and (found.st_uid != os.getuid() or found.st_mode & 0o077):
            fault = f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; tokens are kept in it"
        elif not os.access(there, os.W_OK | os.X_OK):
            fault = f"{path}: {there} can't be written to"
        free = shutil.disk_usage(there).free
    except OSError as error:
        return Runtime(str(path), f"{path}: {_why(error)}", longest)
    return Runtime(str(path), fault, longest, free, _file_system(there))


def _file_system(path: Path) -> str:
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "an unknown file system"


def _network(port: int) -> Network:
    wanted = os.environ.get(VARIABLE)
    there = addresses()
    shown = tuple(map(str, there))
    taken = _taken(port)
    low, high = (int(n) for n in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    try:
        chosen = choose(wanted, there, resolved())
    except ProtocolError as error:
        return Network("", str(error), False, shown, VARIABLE if wanted else "", port, taken, (low, high))
    return Network(str(chosen), "", chosen.loopback, shown, VARIABLE if wanted else "", port, taken, (low, high))


def _taken(port: int) -> str:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
            tried.listen(1)
        except OSError as error:
            return "another process listens there" if error.errno == errno.EADDRINUSE else _why(error)
    return ""


def _clock() -> Clock:
    lag = 0.0
    for _ in range(10):
        began = time.monotonic()
        time.sleep(0.01)
        lag = max(lag, time.monotonic() - began - 0.01)
    return Clock(time.get_clock_info("monotonic").resolution, lag)
