"""What a bundle takes in, and what it never does."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_reshard.doctor import bundle, journaled, stacks
from elastic_reshard.doctor.bundle import Bundle, Wanted
from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.processes import started

TOKEN = "a-token-of-some-job"


def made(**more: Any) -> Bundle:
    return Bundle(Wanted("job", token=TOKEN, **more))


def test_the_token_is_blotted_out_wherever_it_turns_up(tmp_path: Path) -> None:
    found = made()
    found.add("text", f"Bearer {TOKEN}")
    found.add("raw", TOKEN.encode())
    found.add("data.json", {"deep": [{"token": TOKEN}]})
    found.lacks("other", f"401 for {TOKEN}")
    found.write(tmp_path / "case.tar.gz")
    assert TOKEN.encode() not in b"".join(found.files.values())
    assert b"[the job's token]" in found.files["missing.json"]
    assert json.loads(found.files["data.json"])["deep"]


def test_a_token_is_blotted_out_of_json_too_and_the_file_is_private(tmp_path: Path) -> None:
    found = Bundle(Wanted("job", token='say"it\\'))
    found.add("data.json", {"why": 'Bearer say"it\\'})
    assert found.files["data.json"].count(b"[the job's token]") == 1
    place = tmp_path / "case.tar.gz"
    place.touch(mode=0o644)
    found.write(place)
    assert place.stat().st_mode & 0o777 == 0o600


CATCHES = """
import signal, sys
signal.signal(signal.SIGUSR2, lambda *_: print("hit", flush=True))
print("there", flush=True)
sys.stdin.read()
"""


def test_only_our_own_programs_are_asked_for_stacks() -> None:
    """A member's SIGUSR2 may mean "preempted" to the user's program; a mover's number may be somebody else's by now."""
    process = subprocess.Popen([sys.executable, "-c", CATCHES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        pids = {"member a": process.pid, "mover b": process.pid, "mover c": process.pid}
        found = stacks.look(pids, {"mover b": 1})
        assert all(said["answers"] and "stacks" not in said for said in found.values())
        found = stacks.look(pids, {"mover c": started(process.pid) or 0})
        assert [who for who, said in found.items() if "stacks" in said] == ["mover c"]
        assert process.communicate()[0] == b"hit\n"
    finally:
        process.kill()
        process.communicate()


def test_the_doctor_needs_no_torch() -> None:
    """It is to say that torch is not installed."""
    line = "import sys, elastic_reshard.doctor.bundle; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", line], check=True, timeout=60)


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_LARGEST", 100)
    monkeypatch.setattr(bundle, "_WHOLE", 300)
    found = made()
    found.add("long", b"a" * 1000 + b"the end")
    assert found.files["long"].endswith(b"the end")
    assert len(found.files["long"]) < 150
    found.add("second", b"b" * 90)
    found.add("third", b"c" * 90)
    assert "third" in found.missing


def test_when_time_is_over_the_rest_is_named(tmp_path: Path) -> None:
    found = made(within=0.0)
    assert found.attempt("late", lambda: b"x") is None
    assert found.missing["late"].endswith("were over")

    def fails() -> bytes:
        raise OSError("no such thing")

    other = made()
    assert other.attempt("gone", fails) is None
    assert other.missing["gone"] == "OSError: no such thing"
    with pytest.raises(ProtocolError, match="cannot be written"):
        other.write(tmp_path / "nowhere" / "case.tar.gz")


def test_only_a_log_s_end_is_taken(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert bundle.tail(tmp_path / "log", 4) == b"6789"
    assert bundle.tail(tmp_path / "log", 40) == b"0123456789"


def test_what_is_no_journal_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="there is no journal"):
        journaled.read(tmp_path / "none")
    (tmp_path / "text").write_text("no database")
    with pytest.raises(ProtocolError, match="cannot be read"):
        journaled.read(tmp_path / "text")
    sqlite3.connect(tmp_path / "other").close()
    with sqlite3.connect(tmp_path / "other") as sql:
        sql.execute("CREATE TABLE t (x)")
    sql.close()
    with pytest.raises(ProtocolError, match="it has the tables t"):
        journaled.read(tmp_path / "other")
