"""`elastic-reshard watch` as a person and a script run it: a real process beside a real supervisor."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from elastic_reshard.protocol.messages import Landing, MoverSaid
from tests.supervisor.talk import Host, key, name, statement, until
from tests.test_cli_job import ROOT, Shell, admitted, shell

__all__ = ["shell"]


class Lines:
    """What `watch --json` prints, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.seen = process, list[Any]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(json.loads(line))

    def has(self, event: str, wanted: Callable[[dict[str, Any]], bool] = lambda fields: True) -> None:
        until(lambda: any(e["event"] == event and wanted(e["fields"]) for e in self.seen), f"{event} is printed")

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        self._thread.join(20)
        assert self.process.stderr is not None
        return self.process.wait(20), self.process.stderr.read()


def test_json_is_an_event_a_line_through_a_restart(shell: Shell) -> None:
    running = shell.supervisor()
    lines = Lines(shell.begin("watch", "--json"))
    lines.has("supervisor.started", lambda f: f["term"] == 1)
    with admitted(running):
        lines.has("group.admitted", lambda f: f["group"] == "trainer")
        lines.has("member.live", lambda f: f["member"] == name(1))
    assert [e["number"] for e in lines.seen] == list(range(1, len(lines.seen) + 1)), "each once, none lost"
    assert set(lines.seen[0]) == {"number", "at", "time", "event", "fields"}
    assert running.end()[0] == 0
    lines.has("watch.unreachable", lambda f: "did not answer" in f["reason"])
    again = shell.supervisor(port=int(running.url.rpartition(":")[2]))
    lines.has("supervisor.started", lambda f: f["term"] == 2)
    assert sum(e["event"] == "watch.unreachable" for e in lines.seen) == 1, "said once"
    assert lines.end() == (0, "")
    assert again.end(signal.SIGINT)[0] == 0


def test_a_person_sees_what_the_page_shows(shell: Shell) -> None:
    running = shell.supervisor()
    landing = Landing(arena="cd" * 16, cells=4, cell=1 << 20)
    more: dict[str, Any] = {"roles": {"destination"}, "source": None, "destination": key(), "host": "b"}
    with admitted(running) as host, Host(running, "b") as other, host.beating(), other.beating():  # type: ignore[arg-type]
        other.admitted([statement(0, 1, group="engine", size=1, landing=landing, **more)])
        host.listen(lambda: "engine" in host.view.groups)
        host.publish(1, number=2)
        host.listen(lambda: bool(host.view.transfers))
        (transfer,) = host.view.transfers.values()
        other.say(MoverSaid(member=name(0, group="engine"), mover="ab", transfer=transfer.id, state="running", cells=3,
                            to_land=4, waits=(name(0), 0)))  # fmt: skip
        code, out, err = shell("watch", "--for", "1")
        assert code == 0, err
        for said in (
            "job job   term 1", "committed nothing", "version 1 (step): commits when engine has all of it", "engine-0",
            "3 of 4 cells", "landing", "publishes", "version 1 (step) of trainer begins to move", "connected",
            "mover running, waits for trainer-0", "trainer-1 live", "2/2",
        ):  # fmt: skip
            assert said in " ".join(out.split("  ")) or said in out, said
        assert "@" not in out.replace("@http", ""), "no incarnations"


def test_it_draws_in_place_on_a_terminal_and_ends_by_ctrl_c(shell: Shell) -> None:
    running = shell.supervisor()
    master, slave = pty.openpty()
    shell.environment |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    said = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(master, 65536):
                said.extend(chunk)
        except OSError:  # the other end is closed
            return

    process = subprocess.Popen(
        [sys.executable, "-m", "elastic_reshard.cli", "watch"],
        stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=shell.environment,
    )  # fmt: skip
    shell.started.append(process)  # type: ignore[arg-type]
    os.close(slave)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        with admitted(running) as host, host.beating():
            until(lambda: b"trainer is whole and admitted" in said, "the event is drawn")
            until(
                lambda: re.search(rb"trainer.*live.*publishes.*2/2", said, re.DOTALL) is not None, "the group is drawn"
            )
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        reader.join(20)
        os.close(master)
    assert b"\x1b[" in said
    assert b"Traceback" not in said


def test_a_wrong_token_is_one_sentence(shell: Shell) -> None:
    running = shell.supervisor()
    shell.environment["ELASTIC_RESHARD_TOKEN"] = "another-jobs-token"
    code, out, err = shell("watch", "--url", running.url)
    assert (code, out) == (2, "")
    assert err.startswith("elastic-reshard: the supervisor")
    assert err.endswith("does not know this token; see $ELASTIC_RESHARD_TOKEN\n")
    assert err.count("\n") == 1
