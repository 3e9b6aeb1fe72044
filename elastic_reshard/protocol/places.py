"""Where processes of one user on one machine find each other: the runtime folder, and a job's url and token in it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from elastic_reshard.errors import ProtocolError

__all__ = [
    "TOKEN_VARIABLE",
    "URL_VARIABLE",
    "Address",
    "Place",
    "Written",
    "base_url",
    "job_folder",
    "place_of",
    "runtime_folder",
    "take_back",
    "write_private",
]

TOKEN_VARIABLE = "ELASTIC_RESHARD_TOKEN"
URL_VARIABLE = "ELASTIC_RESHARD_URL"


def runtime_folder(given: str | Path | None = None) -> Path:
    """`given`, else $ELASTIC_RESHARD_RUNTIME, else $XDG_RUNTIME_DIR/elastic_reshard, else <tempdir>/elastic_reshard-<uid>.

    Made if it is not there, mode 0700. ProtocolError if it is another user's, a link, or open to others.
    """
    chosen = given or os.environ.get("ELASTIC_RESHARD_RUNTIME")
    if chosen is None:
        mine = os.environ.get("XDG_RUNTIME_DIR")
        chosen = (
            Path(mine) / "elastic_reshard" if mine else Path(tempfile.gettempdir()) / f"elastic_reshard-{os.getuid()}"
        )
    return _private(Path(chosen))


def job_folder(job: str, runtime: str | Path | None = None) -> Path:
    """The job's folder in the runtime folder; made if it is not there."""
    return _private(runtime_folder(runtime) / job)


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ProtocolError(
            f"runtime folder {folder} cannot be made: {error.strerror}; set ELASTIC_RESHARD_RUNTIME"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ProtocolError(
            f"runtime folder {folder} is a link, another user's or open to others (mode {stat.S_IMODE(found.st_mode):o}); "
            "tokens are kept in it: make it yours with mode 0700, or set ELASTIC_RESHARD_RUNTIME to another one"
        )
    return folder


class Written(NamedTuple):
    """Which file was written: another with the same text is another one."""

    device: int
    inode: int
    modified: int  # in ns; an inode's number is given again when its file is gone


def _made(found: os.stat_result) -> Written:
    return Written(found.st_dev, found.st_ino, found.st_mtime_ns)


def write_private(path: Path, text: str) -> Written:
    """Write a file of mode 0600 so that readers see the old text or the new one, never a part. What it returns is for
    `take_back`."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    made = _made(os.lstat(temporary))
    os.replace(temporary, path)
    return made


def take_back(path: Path, written: Written) -> None:
    """Remove a file that `write_private` has written; not what somebody has put in its place since, the same text or not."""
    with suppress(FileNotFoundError):
        if _made(path.lstat()) == written:
            path.unlink()


@dataclass(frozen=True, slots=True)
class Place:
    """A supervisor of this machine and user. token: "" if it was given to the supervisor, who then keeps it in no file."""

    job: str
    url: str
    token: str


def place_of(url: str | None = None, job: str | None = None, runtime: str | Path | None = None) -> Place | None:
    """The supervisor with this url, or of this job, or the only one there is; None if none is written down.

    ProtocolError if neither was given and there are several.
    """
    wanted = base_url(url) if url is not None else None
    found = [p for p in _places(runtime_folder(runtime)) if wanted in (None, p.url) and job in (None, p.job)]
    if len(found) > 1 and wanted is None and job is None:
        raise ProtocolError(
            f"several supervisors are written down: {', '.join(f'{p.job} at {p.url}' for p in found)}; say which"
        )
    return found[0] if found else None


def _places(folder: Path) -> Iterator[Place]:
    for job in sorted(folder.iterdir()):
        url = _line(job / "url")
        if url:
            yield Place(job.name, url, _line(job / "token"))


def _line(path: Path) -> str:
    """A file's one line; "" if it is not there."""
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


class Address:
    """Where a job's supervisor is, followed when it comes back elsewhere: its place in the runtime folder then changes.

    seen: what the folder said when `url` was given (it may be another way to the same supervisor); None: what it says now.
    """

    def __init__(self, url: str, job: str, runtime: str | Path | None = None, seen: str | None = None) -> None:
        self.url, self._job, self._runtime = url, job, runtime
        self.seen = self._written() if seen is None else seen
        self.known = {url}

    def _written(self) -> str:
        try:
            return _line(runtime_folder(self._runtime) / self._job / "url")
        except (ProtocolError, OSError):
            return ""  # what others may write to is not believed; what cannot be read now is read at the next look

    def look(self) -> bool:
        """Whether it has moved since the last look; `url` is the new one then, `known` has all so far. Reads one file."""
        now = self._written()
        if not now or now == self.seen:
            return False
        self.seen = now
        moved, self.url = now != self.url, now
        self.known.add(now)
        return moved


def base_url(url: str) -> str:
    """ "127.0.0.1:29700" or "http://127.0.0.1:29700/" as "http://127.0.0.1:29700". ProtocolError for anything else."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise ProtocolError(f"{url!r} has no port that a supervisor could have: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None or parts.path not in ("", "/"):
        raise ProtocolError(f"{url!r} is no supervisor's url; it looks like 127.0.0.1:29700 or http://host:29700")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"
