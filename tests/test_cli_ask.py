"""The commands that ask about a job and change it, in this process, against a real supervisor."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from elastic_reshard import cli
from elastic_reshard.protocol.messages import Landing, MoverSaid
from elastic_reshard.supervisor import calls
from elastic_reshard.supervisor.client import SupervisorClient
from elastic_reshard.supervisor.server import Options, Supervisor
from tests.supervisor.real import call
from tests.supervisor.talk import Host, body, key, name, statement, until

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    for variable in ("TOKEN", "URL"):
        monkeypatch.delenv(f"ELASTIC_RESHARD_{variable}", raising=False)
    monkeypatch.setenv("ELASTIC_RESHARD_RUNTIME", str(tmp_path / "run"))
    with Supervisor(Options(runtime=tmp_path / "run")) as running:
        yield running


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit code, standard output, standard error) of one command."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["elastic-reshard", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return command


def data(run: Run, *arguments: str) -> Any:
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def hosts(supervisor: Supervisor) -> Iterator[tuple[Host, Host]]:
    """Host a with a gang that has published, host b with an engine that lands it: a transfer is in hand."""
    landing = Landing(arena="cd" * 16, cells=10, cell=1 << 20)
    more: dict[str, Any] = {"roles": {"destination"}, "source": None, "destination": key(), "host": "b"}
    with SupervisorClient(supervisor.url, supervisor.token) as client:
        client.put_fragment(body())
    with Host(supervisor) as host, Host(supervisor, "b") as other, host.beating(), other.beating():
        host.admitted([statement(0, 1), statement(1, 1)])
        other.admitted([statement(0, 1, group="engine", size=1, landing=landing, **more)])
        host.listen(lambda: "engine" in host.view.groups)
        host.publish(1, number=2)
        host.listen(lambda: bool(host.view.transfers))
        yield host, other


def test_everything_there_is_can_be_shown(run: Run, supervisor: Supervisor, hosts: tuple[Host, Host]) -> None:
    host, other = hosts
    (transfer,) = host.view.transfers.values()
    member = name(0, group="engine")
    other.say(MoverSaid(
        member=member, mover="ab", transfer=transfer.id, state="ready", cells=3, received=3_000_000, to_land=10,
    ))  # fmt: skip
    until(lambda: bool(call(supervisor, "GET", "/v1/hosts").json()["b"]["movers"]), "the mover is known")
    for what, row in (
        ("members", f"{member} engine 0 b live"),
        ("groups", "engine destination landing 1/1 -"),
        ("publications", f"{transfer.publication} v1 step trainer moving"),
        ("progress", f"{transfer.publication} v1 moving 3/10 (30 %) 3.0 MB"),
        ("progress", "landing engine 3/10 (30 %) 3.0 MB"),
        ("transfers", f"{transfer.id} {transfer.publication} {transfer.epoch} forming 3/3 trainer engine"),
        ("hosts", f"b connected - {member} live"),
    ):
        code, out, err = run("show", what)
        assert code == 0, err
        rows = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
        assert any(line.startswith(row) for line in rows), out
        assert data(run, "show", what) == call(supervisor, "GET", f"/v1/{what}").json() or what == "progress"
    shown = data(run, "show", "progress", transfer.publication)[transfer.publication]
    assert shown["groups"]["engine"] == {"state": "landing", "serving": 0, "cells": 3, "of": 10, "nbytes": 3_000_000}
    found = call(supervisor, "GET", f"/v1/publications/{transfer.publication}/progress").json()
    assert (found["transfer"], found["cells"], found["of"]) == (transfer.id, 3, 10)
    assert set(data(run, "show", "members", member)) == {member}
    for line, said in (
        (("show", "nothing"), "'nothing' cannot be shown; there are members, groups"),
        (("show", "groups", "x"), "no 'x' among the groups; there are trainer, engine"),
    ):
        code, out, err = run(*line)
        assert (code, out) == (2, "")
        assert said in err


def test_a_drain_is_lifted_and_a_publication_is_given_up(
    run: Run, supervisor: Supervisor, hosts: tuple[Host, Host]
) -> None:
    host, _ = hosts
    (publication,) = host.view.publications
    assert data(run, "drain", "b", "--no-wait", "--within", "60")["missing"] == [name(0, group="engine")]
    code, out, _ = run("show", "hosts")
    assert "within 60 s" in out
    assert "connected, drained" in run("status")[1]
    assert run("undrain", "b") == (0, "host b is not drained; 1 members are known there\n", "")
    assert data(run, "undrain", "b")["drained"] is None
    code, out, err = run("undrain", "x")
    assert (code, out) == (2, "")
    assert "404: no host 'x'; there are a, b" in err
    first = data(run, "abandon", publication, "--reason", "not this", "--request-id", "k")
    assert (first["state"], first["reason"]) == ("abandoned", "not this")
    assert data(run, "abandon", publication, "--reason", "not this", "--request-id", "k") == first
    code, out, err = run("abandon", publication, "--reason", "another", "--request-id", "k")
    assert (code, out) == (2, "")
    assert "409: 'k' was the name of another call" in err
    assert run("abandon", publication)[1] == f"publication {publication} (v1, step) is abandoned: not this\n"


def test_a_grow_is_taken_back(run: Run, supervisor: Supervisor) -> None:
    assert data(run, "grow", "--groups", "2", "--name", "two", "--no-wait")["missing"] == 2
    rows = [" ".join(line.replace("│", " ").split()) for line in run("show", "grows")[1].splitlines()]
    assert any(row.startswith("two 2 groups") and row.endswith("s more 2 -") for row in rows)
    told: list[tuple[int, str, str]] = []
    waiting = threading.Thread(target=lambda: told.append(_grown(supervisor)))
    waiting.start()
    assert run("ungrow", "two") == (0, "grow two was taken back; nobody waited for it\n", "")
    waiting.join(15)
    assert told == [(True, True, 2)]
    assert data(run, "show", "grows")["two"]["cancelled"]
    assert data(run, "ungrow", "two")["cancelled"]
    code, out, err = run("ungrow", "none")
    assert (code, out) == (2, "")
    assert "no grow 'none'; there are two" in err
    assert run("grow", "--groups", "2", "--name", "two")[:2] == (1, "grow two was taken back\n")


def _grown(supervisor: Supervisor) -> Any:
    with SupervisorClient(supervisor.url, supervisor.token) as client:
        grown = client.grow(groups=2, name="two", within=60)
        return grown.done, grown.cancelled, grown.missing


def test_policies_are_shown_changed_and_reset(run: Run, supervisor: Supervisor) -> None:
    before = data(run, "policies")
    assert before["late_after"] == 30.0
    assert "late_after" in run("policies")[1]
    changed = data(run, "policies", "--set", "late_after=10", "--set", "max_lag=2", "--set", "network=gloo")
    assert changed == before | {"late_after": 10.0, "max_lag": 2, "network": "gloo"}
    assert data(run, "policies", "--set", "max_lag=null")["max_lag"] is None
    for line, said in (
        (("--set", "late_after"), "--set wants NAME=VALUE"),
        (("--set", "late_after=-1"), "late_after must not be negative"),
        (("--set", "x=1"), "422: body.x: Extra inputs are not permitted"),
        (("--set", "x=1", "--reset"), "not both"),
    ):
        code, out, err = run("policies", *line)
        assert (code, out) == (2, ""), line
        assert said in err
    assert data(run, "policies", "--reset") == before


def test_events_are_listed_and_followed(run: Run, supervisor: Supervisor) -> None:
    for value in range(3):
        run("policies", "--set", f"late_after={value}")
    code, out, _ = run("events", "--json")
    assert code == 0
    assert [json.loads(line)["number"] for line in out.splitlines()] == [1, 2, 3, 4]
    code, out, _ = run("events", "--limit", "2")
    assert [line.split()[0] for line in out.splitlines()] == ["3", "4"]
    assert "policies.changed policies=Policies(min_groups=1, late_after=2.0" in out.splitlines()[1]
    assert run("events", "--after", "4") == (0, "", "")
    code, out, _ = run("events", "--follow", "--for", "0.3", "--after", "3", "--json")
    assert (code, [json.loads(line)["event"] for line in out.splitlines()]) == (0, ["policies.changed"])


def test_ready_and_the_description(run: Run, supervisor: Supervisor, tmp_path: Path) -> None:
    assert run("ready") == (0, "ready\n", "")
    assert data(run, "ready") == {"ready": True}
    assert "/v1/view" in data(run, "openapi")["paths"]
    with Supervisor(Options(job="other", runtime=tmp_path / "run", recover_from=3)):
        code, out, err = run("ready", "--job", "other")
        assert (code, out) == (1, "")
        assert "0 of 3 members have said what they have" in err


def test_not_done_in_time_is_4(
    run: Run, supervisor: Supervisor, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a supervisor that takes longer than it may: the others' members are still in then."""
    monkeypatch.setattr(calls, "GRACE", -59.5)
    code, out, err = run("drain", "b", "--within", "60")
    assert (code, out) == (4, "")
    assert f"{name(0, group='engine')} did not leave within 60 s" in err


def test_names_are_completed(
    supervisor: Supervisor, hosts: tuple[Host, Host], run: Run, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What a shell asks for, by the variables by which it asks."""
    (publication,) = hosts[0].view.publications
    data(run, "grow", "--groups", "2", "--name", "two", "--no-wait")
    monkeypatch.setenv("_ELASTIC_RESHARD_COMPLETE", "complete_bash")

    def completed(*words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", " ".join(["elastic-reshard", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit) as caught:
            cli.app([], prog_name="elastic-reshard")  # as the installed script is called
        assert not caught.value.code
        return capsys.readouterr().out.split()

    for words, found in (
        (("drain", ""), ["a", "b"]),
        (("undrain", "b"), ["b"]),
        (("shrink", "en"), ["engine"]),
        (("leave", "trainer"), ["trainer", name(0), name(1)]),
        (("abandon", ""), [publication]),
        (("ungrow", "t"), ["two"]),
        (("show", "m"), ["members"]),
    ):
        assert completed(*words) == found, words
    monkeypatch.setenv("ELASTIC_RESHARD_URL", "127.0.0.1:1")
    assert completed("drain", "") == []  # nobody there: nothing is said


def test_every_command_about_a_job_prints_json_on_demand() -> None:
    commands: Any = typer.main.get_command(cli.app)
    for command in (
        "supervisor", "status", "watch", "leave", "drain", "undrain", "shrink", "grow", "ungrow", "abandon", "policies",
        "show", "events", "ready", "openapi", "doctor", "bundle",
    ):  # fmt: skip
        options = {option for p in commands.commands[command].params for option in p.opts}
        assert "--json" in options, command
