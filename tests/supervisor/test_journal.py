"""The journal on a real disk: terms, two supervisors, a kill in the middle of a write, files that are no journal."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_reshard.errors import Fenced, ProtocolError
from elastic_reshard.protocol.docs import GroupDoc, GroupState, MemberDoc, MemberState, PublicationDoc, PublicationState
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor import journal as journals
from elastic_reshard.supervisor.journal import MEMORY, Journal

ROOT = Path(__file__).parents[2]


def member(name: str, reason: str = "") -> MemberDoc:
    return MemberDoc(
        id=name, group="g", rank=0, roles={"source"}, host="a", state=MemberState.LIVE, reason=reason, leave_within=None
    )


def group(name: str) -> GroupDoc:
    return GroupDoc(
        name=name,
        size=1,
        roles={"source"},
        members=("m",),
        whole=True,
        state=GroupState.STALE,
        fragments=(("ab", None),),
    )


def publication(name: str, version: int) -> PublicationDoc:
    return PublicationDoc(
        id=name, weight_version=version, label="ü", extras={"k": [1, None]}, group="g", seq=3, layout="ab",
        state=PublicationState.COMMITTED, sources=(), metrics={"transfer": 0.25},
    )  # fmt: skip


def told(term: int, revision: int, **docs: object) -> Told:
    return Told.model_validate(
        {
            "term": term,
            "instance": "i",
            "base": 1,
            "revision": revision,
            "membership_epoch": 7,
            "committed": "p1.1",
            **docs,
        }
    )


@pytest.fixture(params=["WAL", "DELETE"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a local file system, and on one that is not known to be."""
    if request.param == "DELETE":
        monkeypatch.setattr(journals, "_LOCAL", frozenset())
    return tmp_path / "below" / "journal.sqlite"


def test_a_new_journal_knows_nothing_and_each_start_takes_the_next_term(path: Path) -> None:
    for term in (1, 2, 3):
        journal = Journal.open(path, "j")
        begun = journal.begin(f"i{term}")
        assert (begun.term, begun.told, begun.weight_version) == (term, None, 0)
        journal.close()
        journal.close()


def test_what_was_written_is_there_after_a_restart_and_what_was_removed_is_not(path: Path) -> None:
    journal = Journal.open(path, "j")
    journal.begin("first")
    journal.write(
        told(1, 2, members={"m": member("m"), "gone": member("gone")}, groups={"g": group("g")},
             publications={"p1.1": publication("p1.1", 1)}), 1,
    )  # fmt: skip
    journal.write(told(1, 5, members={"m": member("m", "later"), "gone": None}, groups={"unknown": None}), 2)
    journal.put_fragment("ab", b"body")
    journal.put_layout("cd", b"layout")
    journal.close()
    again = Journal.open(path, "j")
    begun = again.begin("second")
    assert begun.term == 2
    assert begun.weight_version == 2
    assert begun.told == Told(
        term=1, instance="", base=0, revision=5, membership_epoch=7, committed="p1.1", members={"m": member("m", "later")},
        groups={"g": group("g")}, publications={"p1.1": publication("p1.1", 1)},
    )  # fmt: skip
    assert (again.fragment("ab"), again.layout("cd")) == (b"body", b"layout")
    assert again.fragment("cd") is again.layout("ab") is None
    again.close()


def test_of_two_on_one_journal_the_older_is_fenced_and_writes_nothing(path: Path) -> None:
    old, new = Journal.open(path, "j"), Journal.open(path, "j")
    old.begin("old")
    old.write(told(1, 2, members={"m": member("m", "old")}), 1)
    assert new.begin("new").term == 2
    with pytest.raises(Fenced, match="has term 2, this supervisor has 1: another one has started since"):
        old.write(told(1, 3, members={"m": member("m", "fenced")}), 9)
    with pytest.raises(Fenced):
        old.raise_term("old", above=10)
    new.write(told(2, 3, members={"n": member("n", "new")}), 2)
    old.close()
    new.close()
    last = Journal.open(path, "j")
    begun = last.begin("last")
    last.close()
    assert begun.told is not None
    assert begun.told.members == {"m": member("m", "old"), "n": member("n", "new")}
    assert (begun.term, begun.told.term, begun.weight_version) == (3, 2, 2)


def test_a_term_can_be_raised_above_one_that_was_obeyed(path: Path) -> None:
    journal = Journal.open(path, "j")
    journal.begin("i")
    assert journal.raise_term("i", above=41) == 42
    journal.write(told(42, 2), 0)
    journal.close()
    again = Journal.open(path, "j")
    assert again.begin("k").term == 43
    again.close()


def test_a_journal_in_memory_ends_with_its_process() -> None:
    journal = Journal.open(MEMORY, "j")
    assert journal.begin("i").term == 1
    journal.write(told(1, 2, members={"m": member("m")}), 1)
    journal.close()
    again = Journal.open(MEMORY, "j")
    assert again.begin("i").told is None
    again.close()


WRITER = """
import sys
from elastic_reshard.supervisor import journal as journals
from tests.supervisor.test_journal import member, told
if sys.argv[2] == "DELETE":
    journals._LOCAL = frozenset()
journal = journals.Journal.open(sys.argv[1], "j")
begun = journal.begin("w")
n = begun.weight_version
print(begun.term, flush=True)
while True:
    n += 1
    journal.write(told(begun.term, n, members={f"m{i}": member(f"m{i}", str(n)) for i in range(60)}), n)
    print(n, flush=True)
"""


def writer(path: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_a_kill_in_the_middle_of_a_write_leaves_the_last_whole_one(tmp_path: Path, mode: str) -> None:
    """Every write changes 60 documents to its own number: another number among them would be a torn write."""
    path = tmp_path / "j"
    chance = random.Random(5)
    for round_ in range(5):
        with writer(path, mode) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            assert all(lines), process.stderr.read() if process.stderr else ""
            time.sleep(chance.random() * 0.02)  # somewhere in a write: where does not matter
            process.kill()
            said = [int(n) for n in [*lines, *process.stdout.read().split()]]
        journal = Journal.open(path, "j")
        begun = journal.begin("check")
        journal.close()
        assert begun.term == 2 * (round_ + 1)
        assert begun.told is not None
        found = {doc.reason for doc in begun.told.members.values() if doc is not None}
        assert found == {str(begun.weight_version)}
        assert begun.told.revision == begun.weight_version
        assert begun.weight_version in (said[-1], said[-1] + 1), "what was said to be on disk was not"


def test_a_process_is_fenced_at_its_next_write(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with writer(path, "WAL") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        mine = Journal.open(path, "j")
        assert mine.begin("mine").term == 2
        said, complaint = process.communicate(timeout=30)
    assert "Fenced: journal" in complaint
    assert process.returncode == 1
    with sqlite3.connect(path) as sql:
        (version,) = sql.execute("SELECT weight_version FROM meta").fetchone()
    sql.close()
    assert version == max([int(n) for n in said.split()], default=0)
    mine.close()


def test_what_is_no_journal_is_named_with_what_to_do(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"garbage " * 1000)
    with pytest.raises(
        ProtocolError, match=r"is no journal, or is damaged: .*Move it away and start with --recover-from"
    ):
        Journal.open(path, "j")
    assert path.read_bytes() == b"garbage " * 1000
    with pytest.raises(ProtocolError, match="cannot be opened"):
        Journal.open(path.parent, "j")
    with pytest.raises(ProtocolError, match="cannot be opened"):
        Journal.open(path / "below", "j")


def test_another_jobs_journal_and_another_versions_are_refused(path: Path) -> None:
    Journal.open(path, "j").close()
    with pytest.raises(ProtocolError, match="is of job 'j', not 'k'"):
        Journal.open(path, "k")
    with sqlite3.connect(path) as sql:
        sql.execute("UPDATE meta SET format = 99")
    sql.close()
    with pytest.raises(ProtocolError, match="has format 99, this version reads 1"):
        Journal.open(path, "j")


def test_a_document_of_another_version_is_refused(path: Path) -> None:
    journal = Journal.open(path, "j")
    journal.begin("i")
    journal.write(told(1, 2, members={"m": member("m")}), 1)
    journal.close()
    with sqlite3.connect(path) as sql:
        sql.execute("""UPDATE docs SET body = '{"id": "m", "new_field": 1}'""")
    sql.close()
    journal = Journal.open(path, "j")
    with pytest.raises(ProtocolError, match="has a document that this version cannot read"):
        journal.begin("k")
    journal.close()


FULL = """
import resource, sys
from elastic_reshard.errors import ProtocolError
from elastic_reshard.supervisor.journal import Journal
from tests.supervisor.test_journal import member, told
journal = Journal.open(sys.argv[1], "j")
term = journal.begin("w").term
journal.write(told(term, 2, members={"m": member("m", "whole")}), 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
try:
    journal.write(told(term, 3, members={f"n{i}": member("m", "x" * 4000) for i in range(200)}), 2)
except ProtocolError as error:
    print(error)
"""


def test_a_full_disk_is_an_error_and_the_last_whole_write_stays(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "j")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    assert "cannot be read or written" in done.stdout
    journal = Journal.open(tmp_path / "j", "j")
    begun = journal.begin("again")
    journal.close()
    assert begun.told is not None
    assert begun.told.members == {"m": member("m", "whole")}
    assert begun.weight_version == 1


def test_a_closed_journal_is_not_said_to_be_damaged(path: Path) -> None:
    """A body that is put while the supervisor ends: whoever is told to move the journal away may do it."""
    journal = Journal.open(path, "j")
    journal.begin("i")
    journal.close()
    for call in (
        lambda: journal.put_fragment("ab", b"body"),
        lambda: journal.layout("ab"),
        lambda: journal.write(told(1, 2), 1),
        journal.bodies,
    ):
        with pytest.raises(ProtocolError, match="is closed, as this supervisor of job j ends: nothing was") as caught:
            call()
        assert "ove it away" not in str(caught.value)
    again = Journal.open(path, "j")
    assert (again.begin("k").term, again.fragment("ab")) == (2, None)
    again.close()


def test_what_is_wrong_with_one_write_says_nothing_against_the_file(path: Path) -> None:
    journal = Journal.open(path, "j")
    journal.begin("i")
    journal._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 16)
    with pytest.raises(ProtocolError, match=r"cannot be read or written: .*Nothing was told that is not on disk"):
        journal.put_fragment("ab", bytes(1 << 17))
    journal.put_fragment("ab", b"body")
    assert journal.fragment("ab") == b"body"
    journal.close()
