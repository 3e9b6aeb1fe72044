"""The runtime folder: names, locks, records, and how processes are named for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_reshard.errors import ProtocolError
from elastic_reshard.watchdog.runtime import (
    Lock,
    Paths,
    Record,
    Resident,
    end_process,
    read_record,
    running,
    runtime_folder,
    started,
)


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_RESHARD_RUNTIME", "/here")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user")
    assert runtime_folder(Path("/given")) == Path("/given")
    assert runtime_folder() == Path("/here")
    monkeypatch.delenv("ELASTIC_RESHARD_RUNTIME")
    assert runtime_folder() == Path("/run/user/elastic_reshard")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime_folder().name == f"elastic_reshard-{os.getuid()}"


@pytest.mark.parametrize("job", ["j", "x" * 128, "..", "."])
@pytest.mark.parametrize("length", [4, 40, 70, 80])
def test_socket_paths_fit_and_are_unlike_for_unlike_names(job: str, length: int) -> None:
    base = Path("/" + "r" * (length - 1))
    paths = [Paths.of(job, host, base) for host in ("a", "b", "h" * 128, "h" * 127, "..")]
    assert len({p.sock for p in paths}) == 5
    assert all(len(os.fsencode(p.sock)) + len(".new") < 108 for p in paths)
    assert all(p.folder in (base, *[q.folder for q in paths]) and p.folder.is_relative_to(base) for p in paths)
    assert Paths.of(job, "a", base) == paths[0]


def test_a_folder_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ProtocolError, match="ELASTIC_RESHARD_RUNTIME"):
        Paths.of("j", "a", Path("/" + "r" * 100))


def test_a_lock_is_one_holders_and_passes_to_a_child(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "l"), Lock(tmp_path / "l")
    assert first.take()
    assert not second.take()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(first.fd,))
    first.sign()
    assert second.holder() == (os.getpid(), started(os.getpid()))
    first.release()
    assert not second.take(), "the child holds it"
    with child:
        child.kill()
    assert second.take()
    second.clear()
    assert second.holder() is None
    second.release()


def test_a_removed_lock_is_no_lock(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "l"), Lock(tmp_path / "l")
    assert first.take()
    first.remove()
    assert second.take(), "the file is new"
    first.release()
    assert not first.take()
    second.release()
    assert not Lock(tmp_path / "gone" / "l").take(), "the folder may be removed meanwhile"


def test_records(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert read_record(path) is None
    made = Record(
        os.getpid(), started(os.getpid()), "f" * 16, {"m": Resident(1, 2), "n": Resident(3, 4, "killed", "{}")}
    )
    made.write(path)
    assert read_record(path) == made
    assert made.alive
    assert not Record(os.getpid(), started(os.getpid()) + 1, "f" * 16).alive, "a pid that was used again"
    for garbage in ("", "{", "[]", "{}", '{"pid": 1, "start": 1, "watchdog": "x", "members": {"m": {"no": 1}}}'):
        path.write_text(garbage)
        assert read_record(path) is None
    assert running("nojob", "nohost", tmp_path) is None


def test_only_the_very_process_is_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        start = started(child.pid)
        assert end_process(child.pid, start + 1, 1.0)
        assert child.poll() is None
        assert end_process(child.pid, start, 2.0)
        assert started(child.pid) == 0, "a zombie has ended"
    assert end_process(child.pid, start, 1.0)
