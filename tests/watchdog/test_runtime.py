"""The runtime folder: names, locks, records, and how processes are named for ever."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.places import job_folder, write_private
from elastic_reshard.protocol.wire import Tag, Wire
from elastic_reshard.watchdog.find import Finder
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
from elastic_reshard.watchdog.start import HostConfig
from tests.watchdog.world import bystander, fork_behind_our_back, until


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
    first.close()
    assert not second.take(), "the child holds it"
    with child:
        child.kill()
    assert second.take()
    second.clear()
    assert second.holder() is None
    second.release()


def test_a_forked_bystander_holds_no_lock(tmp_path: Path) -> None:
    """A child that Python forks closes its copy; what C forked keeps it, and is not asked when the lock is given back."""
    first, second = Lock(tmp_path / "l"), Lock(tmp_path / "l")
    assert first.take()
    with bystander(os.fork):
        first.close()
        until(second.take, why="the fork has closed its copy")
    with bystander(fork_behind_our_back):
        second.close()
        assert not first.take()
    assert first.take()
    with bystander(fork_behind_our_back):
        first.release()
        assert second.take()
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


def test_a_supervisor_that_moved_is_followed_on_the_way_to_a_watchdog(runtime: Path) -> None:
    """By whom it asks for, and by what a watchdog that it starts is told."""
    folder = job_folder("j", runtime)
    write_private(folder / "url", "http://one:1")
    config = HostConfig("j", "h", "http://alias:1", "token", runtime)
    assert config.followed() is config
    write_private(folder / "url", "http://two:2")
    moved = config.followed()
    assert (moved.settings(3)["url"], moved.settings(3)["seen"]) == ("http://two:2", "http://two:2")
    assert moved == replace(config, url=moved.url)
    assert moved.followed() is moved
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(config.paths.sock))
        listener.listen()
        over = threading.Event()
        thread = threading.Thread(target=Finder(config, over.is_set).find)
        thread.start()
        asked = Wire(listener.accept()[0])
        asked.send(Tag.HELLO, json.dumps({"protocol": PROTOCOL, "nonce": "x", "watchdog": "f" * 16}).encode())
        [auth] = until(asked.receive)
        over.set()
        thread.join()
        asked.close()
    assert json.loads(auth.payload)["url"] == "http://two:2"
    (folder / "url").unlink()
    (folder / "url").mkdir()
    assert moved.followed() is moved, "what cannot be read tells of no move"


def test_a_full_backlog_has_its_time_as_silence_has(runtime: Path) -> None:
    """Many who ask at once are no reason to start a second watchdog, nor to end the member."""
    job_folder("j", runtime)
    finder = Finder(HostConfig("j", "h", "http://h:1", "t", runtime, Deadlines(watchdog_silent=1.0)), lambda: False)
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(finder.config.paths.sock))
        listener.listen(0)
        waiting = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        waiting.connect(str(finder.config.paths.sock))
        began = time.monotonic()
        assert finder._dial() is None
        assert 1.0 <= time.monotonic() - began < 3.0
        assert "too many wait" in finder.reason
        timer = threading.Timer(0.2, lambda: held.enter_context(listener.accept()[0]))
        timer.start()
        taken = finder._dial()
        timer.join()
        assert taken is not None
        taken.close()


def test_only_the_very_process_is_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        start = started(child.pid)
        assert end_process(child.pid, start + 1, 1.0)
        assert child.poll() is None
        assert end_process(child.pid, start, 2.0)
        assert started(child.pid) == 0, "a zombie has ended"
    assert end_process(child.pid, start, 1.0)
