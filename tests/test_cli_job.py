"""The commands about a job, as a person or a script runs them: real processes, ended by their pid."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_reshard.protocol.messages import Landing, MoverSaid
from elastic_reshard.supervisor.client import SupervisorClient
from elastic_reshard.supervisor.journal import Journal
from tests.supervisor.talk import Host, body, key, name, statement, until

ROOT = Path(__file__).parents[1]


@dataclass
class Running:
    """A supervisor process. Enough of a Supervisor for `Host`."""

    process: subprocess.Popen[str]
    url: str
    token: str
    job: str
    term: int

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """(exit code, standard error) after a signal."""
        self.process.send_signal(number)
        _, told = self.process.communicate(timeout=20)
        return self.process.returncode, told


class Shell:
    """Runs commands with a runtime folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_RESHARD_")}
        self.environment["ELASTIC_RESHARD_RUNTIME"] = str(folder / "run")
        self.started: list[subprocess.Popen[str]] = []

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "elastic_reshard.cli", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=self.environment,
        )  # fmt: skip
        self.started.append(process)
        return process

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)."""
        process = self.begin(*arguments)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    def data(self, *arguments: str) -> Any:
        code, out, err = self(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    def supervisor(self, *arguments: str, port: int = 0) -> Running:
        process = self.begin("supervisor", "--port", str(port), "--json", *arguments)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=20)[1]
        told = json.loads(line)
        token = (self.folder / "run" / told["job"] / "token").read_text()
        assert told["pid"] == process.pid
        return Running(process, told["url"], token, told["job"], told["term"])


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def admitted(running: Running) -> Host:
    with SupervisorClient(running.url, running.token) as client:
        client.put_fragment(body())
    host = Host(running)  # type: ignore[arg-type]
    host.admitted([statement(0, 1), statement(1, 1)])
    return host


def test_status_and_leave_for_a_person_and_for_a_program(shell: Shell) -> None:
    running = shell.supervisor()
    with admitted(running) as host, host.beating():
        found = shell.data("status")
        assert found["health"]["job"] == "job"
        assert found["view"]["groups"]["trainer"]["members"] == [name(0), name(1)]
        code, out, err = shell("status", "--url", running.url)
        assert code == 0, err
        for said in (f"job job at {running.url}", "term 1", "trainer", "stale", "2/2", name(0), name(1), "live"):
            assert said in out
        asked = shell.data("leave", "trainer-0", "--within", "70")
        assert asked[name(0)]["leave_within"] == 70
        assert set(shell.data("leave", "trainer", "--within", "80")) == {name(0), name(1)}
        code, out, _ = shell("leave", name(1), "--within", "90", "--job", "job")
        assert (code, out) == (0, f"{name(1)} (rank 1 of trainer) was asked to leave within 90 s\n")
        host.listen(lambda: [host.view.members[name(r)].leave_within for r in (0, 1)] == [80, 90])
        code, out, err = shell("leave", "nobody")
        assert (code, out) == (2, "")
        assert err == f"elastic-reshard: no member and no group 'nobody'; there are: trainer, {name(0)}, {name(1)}\n"
    assert running.end()[0] == 0


def test_the_membership_is_changed_by_commands(shell: Shell) -> None:
    running = shell.supervisor("--cell-bytes", "4096", "--verify-full")
    more: dict[str, Any] = {"roles": {"destination"}, "source": None, "destination": key(), "host": "a"}
    engine = statement(0, 1, group="engine", size=1, **more)
    with admitted(running) as host, host.beating():
        assert shell.data("grow", "--groups", "1", "--within", "60", "--name", "one", "--no-wait")["missing"] == 1
        code, out, err = shell("status")
        assert code == 0, err
        assert "grow one waits for 1 of 1 groups" in out
        assert "no transfer in hand" in out
        found = shell.data("status")
        assert (found["grow"]["name"], found["health"]["cell"], found["health"]["verify"]) == ("one", 4096, "full")
        assert found["hosts"]["a"] == {
            "connected": True,
            "members": {name(0): "live", name(1): "live"},
            "movers": {},
            "drained": None,
            "domains": ["a"],
            "fabric": {},
        }
        host.admitted([engine])
        assert shell("grow", "--groups", "1", "--name", "one") == (0, "admitted: engine\n", "")
        code, out, err = shell("grow", "--members", "2", "--within", "0")
        assert (code, out) == (1, "admitted: nobody\n")
        assert err == "elastic-reshard: 2 of 2 members did not come within 0 s; start them and grow again\n"
        code, out, _ = shell("drain", "a", "--within", "60", "--no-wait")
        assert code == 0
        assert out.startswith(f"{name(0)} (rank 0 of trainer on a) was asked to leave within 60 s\n")
        assert out.endswith("host a: 3 still in\n")
        assert shell.data("shrink", "engine", "--within", "0")["members"][engine.member]["state"] == "lost"
        assert shell("leave", "trainer-0", "--force")[1] == f"{name(0)} (rank 0 of trainer) was left out\n"
        code, out, err = shell("drain", "a", "--within", "0")
        assert (code, out) == (0, f"{name(1)} (rank 1 of trainer on a) is out\nhost a: all are out\n")
        for line, said in (
            (("grow",), "say how many: --groups N or --members N, one of them"),
            (("grow", "--groups", "1", "--members", "1"), "say how many: --groups N or --members N, one of them"),
            (("drain", "nowhere"), "404: no host 'nowhere'; there are a"),
            (("shrink", "x", "engine", "y"), "404: no group 'x', 'y'; there are "),
        ):
            code, out, err = shell(*line)
            assert (code, out) == (2, ""), line
            assert said in err


def test_status_warns_and_shows_the_transfer_in_hand(shell: Shell) -> None:
    """With another host, whose engine lands what the first one publishes."""
    running = shell.supervisor()
    landing = Landing(arena="cd" * 16, cells=1, cell=1 << 20)
    more: dict[str, Any] = {"roles": {"destination"}, "source": None, "destination": key(), "host": "b"}
    with admitted(running) as host, Host(running, "b") as other, host.beating(), other.beating():  # type: ignore[arg-type]
        other.admitted([statement(0, 1, group="engine", size=1, landing=landing, **more)])
        host.listen(lambda: "engine" in host.view.groups)
        host.publish(1, number=2)
        host.listen(lambda: bool(host.view.transfers))
        (transfer,) = host.view.transfers.values()
        host.say(MoverSaid(member=name(0), mover="ab", transfer=transfer.id, state="starting", cells=7))
        with SupervisorClient(running.url, running.token) as client:
            until(lambda: bool(client.hosts()["a"].movers), "the mover is known")
        code, out, err = shell("status")
        assert code == 0, err
        row = next(line for line in out.splitlines() if transfer.id in line)
        for said in (transfer.publication, str(transfer.epoch), "forming", "3/3", "trainer", "engine"):
            assert said in row
        assert f"{name(0)} starting, 7 cells" in " ".join(out.split())
        code, out, err = shell("drain", "a", "--within", "0")
        assert (code, out.splitlines()[-1]) == (0, "host a: all are out")
        assert f"versions in the memory of {name(0)}, {name(1)} are still needed" in err


def test_a_killed_supervisor_started_again_goes_on(shell: Shell) -> None:
    first = shell.supervisor()
    with admitted(first) as host:
        before = host.view.snapshot()
    first.end(signal.SIGKILL)
    assert shell("status")[0] == 1  # nobody answers
    second = shell.supervisor(port=int(first.url.rpartition(":")[2]))
    assert (second.url, second.token, second.term) == (first.url, first.token, 2)
    found = shell.data("status")["view"]
    assert found["groups"] == before.model_dump(mode="json")["groups"]
    assert list(found["members"]) == list(before.members)
    assert second.end()[0] == 0


def test_of_two_on_one_journal_the_first_ends_with_3(shell: Shell) -> None:
    first = shell.supervisor()
    second = shell.supervisor()
    assert (first.term, second.term) == (1, 2)
    with admitted(second) as host:
        host.listen(lambda: host.view.term == 2)
    with Host(first, obeyed=(2, "second")) as host:  # type: ignore[arg-type]
        host.listen(lambda: host.farewell is not None)
    out, err = first.process.communicate(timeout=20)
    assert first.process.returncode == 3, err
    assert out == ""
    assert "elastic-reshard: host a has obeyed term 2 of job job, this supervisor has 1" in err
    assert shell.data("status")["health"]["term"] == 2


def test_settings_are_obeyed(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-given-token\n")
    process = shell.begin(
        "supervisor", "--port", "0", "--job", "mine", "--journal", str(tmp_path / "deep" / "j"), "--token-file",
        str(tmp_path / "token"), "--min-groups", "3", "--late-after", "7.5", "--max-lag", "2", "--gather-window", "0.5",
        "--recover-from-members", "4",
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("supervisor of job mine, term 1, at http://127.0.0.1:")
    with SupervisorClient(line.split()[-1], "a-given-token") as client:
        found = client.policies()
        assert (found.min_groups, found.late_after, found.max_lag, found.gather_window) == (3, 7.5, 2, 0.5)
        assert client.health()["status"] == "recovering"
    assert (tmp_path / "deep" / "j").exists()
    assert not (tmp_path / "run" / "mine" / "token").exists()
    assert b"a-given-token" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_what_cannot_be_served_is_one_sentence_and_2(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(b"garbage " * 1000)
    Journal.open(tmp_path / "other", "other").close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for line, said in (
            (("supervisor", "--port", port), f"port {port} of 127.0.0.1 is taken by another process"),
            (("supervisor", "--port", "0", "--journal", str(tmp_path / "garbage")), "is no journal, or is damaged"),
            (("supervisor", "--port", "0", "--journal", str(tmp_path / "other")), "is of job 'other', not 'job'"),
            (("supervisor", "--port", "0", "--token-file", str(tmp_path / "none")), "cannot be read: No such file"),
            (("status",), "no supervisor is written down in the runtime folder"),
            (("watch", "--url", "nonsense"), "'nonsense' is no supervisor's url"),
            (("leave", "x", "--url", f"127.0.0.1:{port}"), "the token of the supervisor at"),
        ):
            code, out, err = shell(*line)
            assert (code, out) == (2, ""), line
            assert err.startswith("elastic-reshard: ")
            assert err.count("\n") == 1
            assert said in err


def test_nobody_there_is_1(shell: Shell) -> None:
    shell.environment["ELASTIC_RESHARD_TOKEN"] = "some-token"
    code, out, err = shell("status", "--url", "127.0.0.1:1")
    assert (code, out) == (1, "")
    assert "the supervisor at http://127.0.0.1:1 did not answer" in err


def test_starting_is_light() -> None:
    """No torch for any of these commands, and no web framework before one of them runs."""
    line = (
        "import sys, elastic_reshard.cli; "
        "assert not {'torch', 'fastapi', 'uvicorn', 'pydantic', 'httpx', 'websockets'} & set(sys.modules); "
        "import elastic_reshard.supervisor.server, elastic_reshard.supervisor.client; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", line], check=True, timeout=60)
