"""The nursery: one per machine and job, found, started, replaced; movers that outlive it; nothing left of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from elastic_reshard.errors import MembershipError, Unauthorized
from elastic_reshard.mover import nursery
from elastic_reshard.mover.libraries import load
from elastic_reshard.mover.nursery import PRELOAD, WORK, NurseryConfig
from elastic_reshard.protocol.processes import Lock, end_process, started
from tests.mover.place import Place
from tests.watchdog.world import bystander, fork_behind_our_back, open_files, until


def test_a_mover_is_forked_and_named_for_ever(place: Place) -> None:
    client = place.client()
    one = place.fork(client)
    again = place.fork(client)
    print(f"fork: {again.seconds * 1000:.1f} ms")
    assert again.seconds < 0.5
    assert started(one.pid) == one.start != 0
    assert Path(f"/proc/{one.pid}/cmdline").read_bytes() == Path(f"/proc/{place.pid()}/cmdline").read_bytes()
    assert "secret-of-the-job" not in Path(f"/proc/{place.pid()}/cmdline").read_text()
    os.kill(one.pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{one.pid}").exists(), why="it is reaped by its nursery")
    assert started(again.pid) == again.start


def test_the_real_one_has_no_threads_and_forks_at_once(place: Place) -> None:
    client = place.client(work=WORK, preload=PRELOAD)
    began = time.monotonic()
    client.warm(began + 60.0)
    loaded = time.monotonic() - began
    born = place.fork(client)
    print(f"loading {loaded:.2f} s, fork {born.seconds * 1000:.1f} ms")
    pid = place.pid()
    assert len(os.listdir(f"/proc/{pid}/task")) == 1
    assert "torch" in Path(f"/proc/{pid}/maps").read_text()
    assert born.seconds < 1.0
    for process in (pid, born.pid):
        maps = Path(f"/proc/{process}/maps").read_text()
        for library in ("cuda.bindings.driver", "cuda.bindings.nvrtc", "nccl.bindings.nccl"):
            there = find_spec(library.partition(".")[0]) is not None
            assert (f"/{library.replace('.', '/')}." in maps) == there, f"{library} is loaded before movers are forked"
    until(lambda: any("mover status" in f for f in open_files(born.pid)))
    files = sorted(f.rpartition("/")[2] for f in open_files(born.pid))
    own = ["anon_inode:[eventfd]", "memfd:mover status (deleted)", "memfd:mover status (deleted)", "null"]
    assert files == sorted([*own, "~nursery.log", "~nursery.log"]), "nothing of the nursery is open in it"


def test_libraries_that_are_missing_or_broken_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('cannot find libnccl.so.2')")
    (tmp_path / "unlike_library.py").write_text("raise ValueError('numpy.dtype size changed')")
    (tmp_path / "sound_library.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    found = load(["no_such.core", "broken_library", "unlike_library", "sound_library", "sound_library.m2n"])
    assert found == ["sound_library"]


def test_it_is_nobodys_child_and_several_share_it(place: Place) -> None:
    first, second = place.client(), place.client()
    first.warm(time.monotonic() + 20.0)
    pid = place.pid()
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(stat[1]) != os.getpid()
    assert int(stat[3]) not in (0, os.getsid(0))
    place.fork(second)
    assert place.pid() == pid
    first.close(goodbye=True)
    place.fork(second)
    assert place.pid() == pid, "the second needs it still"


def test_racing_starters_make_one(place: Place) -> None:
    clients = [place.client() for _ in range(4)]
    threads = [threading.Thread(target=place.fork, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({born.pid for born in place.born}) == 4
    assert place.config().log.read_text().count("nursery.listening") == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_one_is_replaced_and_its_movers_live_on(place: Place, how: signal.Signals) -> None:
    client = place.client()
    mover = place.fork(client)
    pid = place.pid()
    os.kill(pid, how)
    other = place.fork(client)
    assert place.pid() != pid
    assert started(pid) == 0, "a frozen one is ended: it could wake"
    assert started(mover.pid) == mover.start
    assert started(other.pid) == other.start


def test_a_process_forked_while_it_was_started_keeps_nobody_from_replacing_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, start = place.client(), nursery._exec
    with ExitStack() as bystanders:

        def forking(config: NurseryConfig, lock: Lock) -> None:
            bystanders.enter_context(bystander(fork_behind_our_back))
            start(config, lock)

        with monkeypatch.context() as patch:
            patch.setattr(nursery, "_exec", forking)
            place.fork(client)
        os.kill(place.pid(), signal.SIGKILL)
        place.fork(client, within=5.0)
        place.end()
        until(lambda: not place.folder.exists(), why="it goes, too")


def test_it_goes_when_nobody_is_connected(place: Place) -> None:
    client = place.client(linger=0.3)
    client.warm(time.monotonic() + 20.0)
    pid = place.pid()
    client.close(goodbye=False)
    until(lambda: started(pid) == 0, 3.0)
    assert not place.folder.exists()


def test_another_token_gets_nothing(place: Place) -> None:
    place.client().warm(time.monotonic() + 20.0)
    pid = place.pid()
    with pytest.raises(Unauthorized, match="another token"):
        place.client(token="another").warm(time.monotonic() + 2.0)
    assert place.pid() == pid


@pytest.mark.parametrize(
    "packets",
    [
        [b"{"],
        [b"[]"],
        [json.dumps({"fork": {}}).encode()],
        [b'{"bye": true}'],
        [b"x" * 70000],
        [b"[" * 4000],
        [b'{"nonce": "\\ud800", "proof": "x"}'],
        ['{"nonce": "n", "proof": "\u00e9"}'.encode()],
    ],
    ids=lambda packets: packets[0][:12].decode(),
)
def test_garbage_ends_its_own_connection_only(place: Place, packets: list[bytes]) -> None:
    client = place.client()
    client.warm(time.monotonic() + 20.0)
    pid = place.pid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5.0)
        sock.connect(str(place.config().sock))
        assert b"nonce" in sock.recv(4096)
        for packet in packets:
            sock.send(packet)
        assert b"pid" not in b"".join(iter(lambda: sock.recv(4096), b"")), "nothing is done for it, and it is let go"
    place.fork(client)
    assert place.pid() == pid


def test_a_worker_that_cannot_be_loaded_is_an_error_that_names_the_log(place: Place) -> None:
    with pytest.raises(MembershipError, match=r"~nursery\.log"):
        place.client(work="no.such.module:Work").warm(time.monotonic() + 1.5)
    assert "No module named 'no'" in place.config().log.read_text()
    lock = Lock(place.config().lock)
    until(lock.take, why="the last attempt has ended too")
    lock.release()


def test_the_watchdogs_side_needs_no_torch() -> None:
    code = "import elastic_reshard.mover.nursery, elastic_reshard.mover.core, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_only_the_very_process_is_ended(place: Place) -> None:
    born = place.fork(place.client())
    assert end_process(born.pid, born.start + 1, 1.0)
    assert started(born.pid) == born.start
