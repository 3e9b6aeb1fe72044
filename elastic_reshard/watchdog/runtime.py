"""Where a watchdog and the members of its host find each other: the runtime folder and the files in it.

<folder>/<job>/<host>.sock   the watchdog's Unix socket
               <host>.lock   whoever starts, replaces or ends a watchdog holds its flock; names the watchdog being started
               <host>.json   who the watchdog is, and its members (`Record`); a replacement reads it
               <host>.log    the watchdog's log
               <host>.drain  until when the host is to be empty (`watchdog.drain`)
               ~nursery-N.*  socket, lock and log of the machine's nursery (`mover.nursery`), N its network namespace; no
                             host has such a name
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from elastic_reshard.errors import MembershipError, ProtocolError
from elastic_reshard.protocol.processes import Lock, condemn, end_process, spent, started

__all__ = [
    "Deckhand",
    "Lock",
    "Paths",
    "Record",
    "Resident",
    "condemn",
    "end_process",
    "read_record",
    "running",
    "runtime_folder",
    "spent",
    "started",
]

VARIABLE: Final = "ELASTIC_RESHARD_RUNTIME"
_LONGEST_SOCKET: Final = 107  # bytes of sun_path, without its end
_LONGEST_NAME: Final = 40


def runtime_folder(runtime: Path | None = None) -> Path:
    """`runtime`, else $ELASTIC_RESHARD_RUNTIME, else $XDG_RUNTIME_DIR/elastic_reshard, else one in the temporary folder."""
    if runtime is not None:
        return runtime
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    if os.environ.get("XDG_RUNTIME_DIR"):
        return Path(os.environ["XDG_RUNTIME_DIR"]) / "elastic_reshard"
    return Path(tempfile.gettempdir()) / f"elastic_reshard-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Paths:
    """The files of one host of one job."""

    base: Path
    folder: Path
    name: str

    @classmethod
    def of(cls, job: str, host: str, runtime: Path | None = None) -> Paths:
        """Where they are; makes nothing. Raises ProtocolError if not even a short name fits a socket's path."""
        base = runtime_folder(runtime).absolute()
        folder, name = base / _short(job), _short(host)
        if _too_long(folder, name):
            digest = hashlib.blake2s(f"{job}\0{host}".encode(), digest_size=8).hexdigest()
            folder, name = base, digest
        if _too_long(folder, name):
            raise ProtocolError(
                f"the runtime folder {base} has too long a name for a Unix socket in it ({_LONGEST_SOCKET} bytes); "
                f"set {VARIABLE} to a shorter one"
            )
        return cls(base, folder, name)

    @classmethod
    def of_nursery(cls, job: str, runtime: Path | None = None) -> Paths:
        """Those of the nursery that all hosts of one job on one machine share, in one network: movers are born into it."""
        return cls.of(job, f"~nursery-{os.stat('/proc/self/ns/net').st_ino}", runtime)

    def _file(self, end: str) -> Path:
        return self.folder / f"{self.name}.{end}"

    @property
    def sock(self) -> Path:
        """The watchdog's socket."""
        return self._file("sock")

    @property
    def lock(self) -> Path:
        """The lock of starters."""
        return self._file("lock")

    @property
    def record(self) -> Path:
        """Who the watchdog is."""
        return self._file("json")

    @property
    def log(self) -> Path:
        """The watchdog's log."""
        return self._file("log")

    @property
    def drain(self) -> Path:
        """Until when the host is to be empty."""
        return self._file("drain")

    def make(self) -> None:
        """Make the folders, only for this user. Raises MembershipError if others could change what is in them."""
        for folder in dict.fromkeys((self.base, self.folder)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            open_to_others = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
            if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.getuid()) or open_to_others:
                raise MembershipError(
                    f"the runtime folder {folder} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}; "
                    f"it must be a folder of user {os.getuid()} that others cannot write to: remove it, or set {VARIABLE}"
                )


def _short(name: str) -> str:
    # "." and ".." are names too, and long ones would not fit.
    if len(name) <= _LONGEST_NAME and not name.startswith("."):
        return name
    return hashlib.blake2s(name.encode(), digest_size=8).hexdigest()


def _too_long(folder: Path, name: str) -> bool:
    return len(os.fsencode(folder / f"{name}.sock")) > _LONGEST_SOCKET - len(".new")


@dataclass(frozen=True, slots=True)
class Resident:
    """A member in a watchdog's record. ended: how it ended, None while it lives; then `statement` is its last, as JSON."""

    pid: int
    start: int
    ended: str | None = None
    statement: str | None = None


@dataclass(frozen=True, slots=True)
class Deckhand:
    """A mover in a watchdog's record. transfer: the last that it was given, "" for none."""

    member: str
    pid: int
    start: int
    transfer: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """A watchdog, and the members it served when it last wrote, and their movers that lived."""

    pid: int
    start: int
    watchdog: str
    members: dict[str, Resident] = field(default_factory=dict)
    movers: dict[str, Deckhand] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replace the file as a whole."""
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(asdict(self)))
        fresh.replace(path)

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        return self.start != 0 and started(self.pid) == self.start


def read_record(path: Path) -> Record | None:
    """The last watchdog's record; None if there is none that can be read."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        members = {str(name): Resident(**resident) for name, resident in data["members"].items()}
        movers = {str(name): Deckhand(**hand) for name, hand in data.get("movers", {}).items()}
        return Record(int(data["pid"]), int(data["start"]), str(data["watchdog"]), members, movers)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def running(job: str, host: str, runtime: Path | None = None) -> Record | None:
    """The watchdog of a host that runs now (frozen ones too), or None. For tests and tools."""
    record = read_record(Paths.of(job, host, runtime).record)
    return record if record is not None and record.alive else None
