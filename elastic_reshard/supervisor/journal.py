"""The journal: what a supervisor that starts again must know. SQLite, one file a job.

Every start takes the next term by compare-and-set; every write checks the term in its own transaction, so that of two
supervisors on one journal the older one is `Fenced` at its next write. What `write` has returned from is on disk.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from elastic_reshard.errors import Fenced, ProtocolError
from elastic_reshard.protocol.docs import GroupDoc, MemberDoc, PublicationDoc, TransferDoc
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.requests import MOST, Kept
from elastic_reshard.supervisor.settings import Settings

__all__ = ["MEMORY", "Begun", "Journal"]

# A journal that ends with its process: for supervisors that live inside a driver script.
MEMORY: Final = ":memory:"
_FORMAT: Final = 1
# How long a write waits for another supervisor's, in seconds. A write takes milliseconds.
_BUSY: Final = 5.0
# SQLite's WAL needs shared memory between processes, which network file systems have not.
_LOCAL: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "ramfs"})
_KINDS: Final[dict[str, type[BaseModel]]] = {
    "members": MemberDoc,
    "groups": GroupDoc,
    "publications": PublicationDoc,
    "transfers": TransferDoc,
}

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (
    one INTEGER PRIMARY KEY CHECK (one = 1), format INTEGER NOT NULL, job TEXT NOT NULL, term INTEGER NOT NULL,
    instance TEXT NOT NULL, written_by INTEGER NOT NULL, revision INTEGER NOT NULL, membership_epoch INTEGER NOT NULL,
    committed TEXT NOT NULL, weight_version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS docs (
    kind TEXT NOT NULL, id TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (kind, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fragments (id TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS layouts (id TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS settings (one INTEGER PRIMARY KEY CHECK (one = 1), body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL, status INTEGER NOT NULL, answer BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Begun:
    """What a start found. told: the view of the last whole write as a snapshot, None if nothing was ever written. settings:
    what people had asked for; requests: calls that were named by who made them, oldest first."""

    term: int
    told: Told | None
    weight_version: int
    settings: Settings | None = None
    requests: tuple[Kept, ...] = ()


class Journal:
    """One open journal. Any thread may call; each call blocks for one transaction (milliseconds; seconds if the disk is
    slow or another supervisor writes). Every method raises ProtocolError if the file cannot be read or written, or is closed.
    """

    def __init__(self, path: str, job: str, connection: sqlite3.Connection) -> None:
        self.path, self.job = path, job
        self.term = 0
        self._connection, self._closed = connection, False
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path, job: str) -> Journal:
        """Open or make the journal of a job; folders that lack are made. `begin` comes next.

        Raises ProtocolError for a file that is no journal, another job's, or of another version.
        """
        place = str(path)
        try:
            if place != MEMORY:
                Path(place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            connection = sqlite3.connect(place, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ProtocolError(f"journal {place} cannot be opened: {error}; name another with --journal") from error
        journal = cls(place, job, connection)
        try:
            journal._prepare()
        except BaseException:
            connection.close()
            raise
        return journal

    def _prepare(self) -> None:
        with self._reading() as sql:
            mode = "WAL" if self.path != MEMORY and _is_local(Path(self.path)) else "DELETE"
            now = sql.execute(f"PRAGMA journal_mode={mode}").fetchone()[0]
            if self.path != MEMORY and now.upper() != mode:
                raise ProtocolError(
                    f"journal {self.path} stays in mode {now}, but {mode} is needed on its file system; "
                    "end the other supervisor that has it open"
                )
            sql.execute("PRAGMA synchronous=FULL")
        with self._writing() as sql:
            for statement in _SCHEMA.split(";"):
                sql.execute(statement)
            sql.execute("INSERT OR IGNORE INTO meta VALUES (1, ?, ?, 0, '', 0, 0, 0, '', 0)", (_FORMAT, self.job))
            kind, job = sql.execute("SELECT format, job FROM meta").fetchone()
        if kind != _FORMAT:
            raise ProtocolError(
                f"journal {self.path} has format {kind}, this version reads {_FORMAT}; use the version that wrote it"
            )
        if job != self.job:
            raise ProtocolError(f"journal {self.path} is of job {job!r}, not {self.job!r}; name another with --journal")

    # -- terms

    def begin(self, instance: str) -> Begun:
        """Take the next term for this start of a supervisor, and what the last one wrote."""
        return self._take_term(instance, 0)

    def raise_term(self, instance: str, above: int) -> int:
        """A term higher than `above`, which hosts obeyed before the journal was lost. Fenced if this start is not the last."""
        return self._take_term(instance, above, mine=self.term).term

    def _take_term(self, instance: str, above: int, mine: int | None = None) -> Begun:
        with self._writing() as sql:
            was, written_by, *meta = sql.execute(
                "SELECT term, written_by, revision, membership_epoch, committed, weight_version FROM meta"
            ).fetchone()
            if mine is not None and was != mine:
                raise self._fenced(was)
            term = max(was, above) + 1
            changed = sql.execute(
                "UPDATE meta SET term = ?, instance = ? WHERE term = ?", (term, instance, was)
            ).rowcount
            if changed != 1:
                raise self._fenced(was)
            docs = sql.execute("SELECT kind, id, body FROM docs").fetchall()
            settings = sql.execute("SELECT body FROM settings").fetchone()
            requests = sql.execute("SELECT id, digest, status, answer FROM requests ORDER BY number").fetchall()
        self.term = term
        told = self._read(docs, written_by, *meta[:3]) if written_by else None
        wanted = self._settings(settings[0]) if settings is not None else None
        return Begun(term, told, meta[3], wanted, tuple(Kept(*row) for row in requests))

    def _settings(self, body: str) -> Settings:
        try:
            return Settings.model_validate_json(body)
        except ValidationError as error:
            raise self._foreign(error) from error

    def _read(self, docs: list[tuple[str, str, str]], term: int, revision: int, epoch: int, committed: str) -> Told:
        found: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        try:
            for kind, name, body in docs:
                found[kind][name] = _KINDS[kind].model_validate_json(body)
        except (KeyError, ValidationError) as error:
            raise self._foreign(error) from error
        return Told(
            term=term, instance="", base=0, revision=revision, membership_epoch=epoch, committed=committed,
            members=found["members"], groups=found["groups"], publications=found["publications"], transfers=found["transfers"],
        )  # fmt: skip

    def _foreign(self, error: Exception) -> ProtocolError:
        return ProtocolError(
            f"journal {self.path} has a document that this version cannot read: {error}; use the version that wrote it, "
            "or move it away and start with --recover-from-members"
        )

    def _fenced(self, term: int) -> Fenced:
        return Fenced(
            f"journal {self.path} of job {self.job} has term {term}, this supervisor has {self.term}: another one has "
            "started since. This one ends; nothing was written."
        )

    # -- the view

    def write(
        self,
        told: Told | None,
        weight_version: int,
        settings: Settings | None = None,
        requests: Sequence[Kept] = (),
    ) -> None:
        """Put what was told on disk, what people have asked for and by which calls: whole or not at all; a document that is
        None is removed. Fenced if another supervisor has begun on this journal since."""
        changed, gone = _rows(told) if told is not None else ([], [])
        with self._writing() as sql:
            was = sql.execute("SELECT term FROM meta").fetchone()[0]
            if was != self.term:
                raise self._fenced(was)
            if told is not None:
                sql.executemany("INSERT OR REPLACE INTO docs VALUES (?, ?, ?)", changed)
                sql.executemany("DELETE FROM docs WHERE kind = ? AND id = ?", gone)
                sql.execute(
                    "UPDATE meta SET written_by = ?, revision = ?, membership_epoch = ?, committed = ?, weight_version = ?",
                    (told.term, told.revision, told.membership_epoch, told.committed, weight_version),
                )
            if settings is not None:
                sql.execute("INSERT OR REPLACE INTO settings VALUES (1, ?)", (settings.model_dump_json(),))
            for one in requests:
                _put_request(sql, one)

    # -- bodies, by content id: the same from whoever writes them, so no term is checked when they are put

    def put_fragment(self, key: str, body: bytes) -> None:
        """Keep a fragment's body."""
        self._put("fragments", key, body)

    def put_layout(self, key: str, body: bytes) -> None:
        """Keep a layout's body."""
        self._put("layouts", key, body)

    def fragment(self, key: str) -> bytes | None:
        """A fragment's body; None if it is not known."""
        return self._get("fragments", key)

    def layout(self, key: str) -> bytes | None:
        """A layout's body; None if it is not known."""
        return self._get("layouts", key)

    def bodies(self) -> set[str]:
        """Ids of all fragments and layouts that are kept."""
        with self._reading() as sql:
            return {row[0] for row in sql.execute("SELECT id FROM fragments UNION SELECT id FROM layouts")}

    def drop_bodies(self, keys: Iterable[str]) -> None:
        """Keep these fragments and layouts no longer. Fenced if another supervisor has begun on this journal since."""
        rows = [(key,) for key in keys]
        with self._writing() as sql:
            was = sql.execute("SELECT term FROM meta").fetchone()[0]
            if was != self.term:
                raise self._fenced(was)
            for table in ("fragments", "layouts"):
                sql.executemany(f"DELETE FROM {table} WHERE id = ?", rows)

    def _put(self, table: str, key: str, body: bytes) -> None:
        with self._writing() as sql:
            sql.execute(f"INSERT OR IGNORE INTO {table} VALUES (?, ?)", (key, body))

    def _get(self, table: str, key: str) -> bytes | None:
        with self._reading() as sql:
            row = sql.execute(f"SELECT body FROM {table} WHERE id = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._closed = True
            self._connection.close()

    # -- transactions

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._closed:
                raise ProtocolError(
                    f"journal {self.path} is closed, as this supervisor of job {self.job} ends: nothing was read or "
                    "written. Ask the one that comes next"
                )
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise self._broken(error) from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction that holds the write lock from its beginning: on disk when this returns, undone if it raises."""
        with self._reading() as sql:
            sql.execute("BEGIN IMMEDIATE")
            try:
                yield sql
                sql.execute("COMMIT")
            finally:
                if sql.in_transaction:
                    sql.execute("ROLLBACK")

    def _broken(self, error: sqlite3.Error) -> ProtocolError:
        # Only a plain DatabaseError tells of the file itself (corrupt, no database); the kinds below it don't.
        if type(error) is sqlite3.DatabaseError:
            return ProtocolError(
                f"journal {self.path} is no journal, or is damaged: {error}. Move it away and start with "
                "--recover-from-members N, N being the number of members of the job that live (0 for a new job)"
            )
        return ProtocolError(
            f"journal {self.path} cannot be read or written: {error}. Nothing was told that is not on disk; free the disk "
            "or end whoever holds the file, and start the supervisor again"
        )


def _rows(told: Told) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """(documents to be put, those to be removed)."""
    changed = [
        (kind, name, doc.model_dump_json())
        for kind in _KINDS
        for name, doc in getattr(told, kind).items()
        if doc is not None
    ]
    return changed, [(kind, name) for kind in _KINDS for name, doc in getattr(told, kind).items() if doc is None]


def _put_request(sql: sqlite3.Connection, one: Kept) -> None:
    """A call that is known already only gets its answer; the oldest are forgotten."""
    sql.execute(
        "INSERT INTO requests (id, digest, status, answer) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET status = excluded.status, answer = excluded.answer",
        (one.key, one.digest, one.status, one.answer),
    )
    sql.execute("DELETE FROM requests WHERE number <= (SELECT max(number) FROM requests) - ?", (MOST,))


def _is_local(path: Path) -> bool:
    """Whether the file system of `path` is a known one of this machine."""
    device = os.stat(path.parent).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1] in _LOCAL
    return False
