"""The command line: what it prints, and that bad input gets one clear sentence on standard error and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_reshard import cli
from elastic_reshard.bench import spawn
from elastic_reshard.bench.elastic_demo_cast import DemoSetup
from elastic_reshard.bench.elastic_demo_outcome import Outcome
from elastic_reshard.bench.spawn import Worker
from elastic_reshard.errors import DigestMismatch
from elastic_reshard.plan.explain import to_json

ROOT = Path(__file__).parents[1]


def nothing(worker: Worker) -> int:
    return worker.rank


@pytest.fixture(scope="module")
def _processes() -> None:
    """What stays for this process's life is made here: the forkserver, and the pipe of libuv's first loop."""
    assert spawn.run(nothing, 1, timeout=60) == [0]


class Shell:
    """Runs the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)."""
        self.monkeypatch.setattr(sys, "argv", ["elastic-reshard", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()  # typer ends with SystemExit, always
        told = self.capsys.readouterr()
        return int(caught.value.code or 0), told.out, told.err


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


BAD = [
    ("demo --model nosuch", "unknown model 'nosuch'; known are tiny, "),
    ("demo --model qwen3-0.6", "Did you mean Qwen3-0.6B?"),
    ("demo --versions 7", "7 versions leave no room for all that the demo inflicts; take at least 8."),
    ("demo --bare --model nosuch", "unknown model"),
    ("plan --model nosuch", "unknown model"),
    ("bench refit --model nosuch", "unknown model"),
    ("plan --source tp3", "Qwen3-0.6B has 16 attention heads, which tp3 does not divide."),
    ("plan --source ep2", "has no experts"),
    ("plan --source pp29", "has 28 layers, fewer than pp29"),
    ("plan --source fsdp0", "fsdp must be at least 1"),
    ("plan --source tp", "cannot read the parallelism 'tp'"),
    ("plan --destination tp2xtp2", "names an axis twice"),
    ("plan --destination fsdp9999999", "at most 1000000"),
    ("plan --model tiny --member 8", "member 8 is outside of a topology of 8 members"),
    ("plan --model tiny --member -1", "member -1 is outside"),
    ("bench refit --model tiny --source fsdp61", "65 members are 65 processes of this machine; at most 64"),
    ("bench refit --model tiny --destination nonsense", "cannot read the parallelism 'nonsense'"),
    ("bench plan --members 64,x", "--members wants numbers separated by commas, got '64,x'."),
    ("bench plan --members 65", "got 65"),
]


@pytest.mark.parametrize(("line", "said"), BAD)
def test_bad_input_gets_one_sentence(shell: Shell, line: str, said: str) -> None:
    code, out, err = shell(*line.split())
    assert code == 2
    assert out == ""
    assert err.startswith("elastic-reshard: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    "line",
    ["demo --versions 1", "demo --versions x", "plan --domain 0", "bench refit --repeats 0", "bench refit --staging 1",
     "bench plan --repeats 0", "nosuch", "plan --nosuch"],
)  # fmt: skip
def test_bad_numbers_and_unknown_words_are_usage_errors(shell: Shell, line: str) -> None:
    code, out, err = shell(*line.split())
    assert code == 2
    assert out == ""
    assert "Usage:" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "line", ["demo", "demo --bare", "demo --bare --model Qwen3-32B", "bench refit --model Qwen3-8B"]
)
def test_too_little_memory_is_seen_before_anything_starts(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(cli.Path, "read_text", lambda _: "MemTotal: 9999999 kB\nMemAvailable: 2097152 kB\n")
    monkeypatch.setattr(spawn, "run", lambda *_, **__: pytest.fail("processes were started"))
    code, out, err = shell(*line.split())
    assert code == 2
    assert out == ""
    assert "GiB of memory, 2.0 GiB are free; choose a smaller model." in err


def test_work_that_failed_is_told_apart_from_bad_input(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise DigestMismatch([("w", "[0:1]", 3)])

    monkeypatch.setattr("elastic_reshard.bench.demo.play", wrong)
    code, out, err = shell("demo", "--bare", "--model", "tiny")
    assert code == 1
    assert out == ""
    assert "1 range(s) differ from what was sent: w [0:1] from member 3" in err


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_demo_with_anything_wrong_says_so_and_fails(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    def played(setup: DemoSetup, *_: object) -> Outcome:
        return Outcome(setup, wrong=["engine-0 rank 1 is not version 7 in w"])

    monkeypatch.setattr("elastic_reshard.bench.elastic_demo.play", played)
    code, out, err = shell("demo", *more)
    assert (code, err) == (1, "")
    assert "engine-0 rank 1 is not version 7 in w" in out
    if more:
        assert json.loads(out)["ok"] is False


def test_plan_for_a_person_and_for_a_program(shell: Shell) -> None:
    line = ("plan", "--model", "tiny", "--source", "fsdp4", "--destination", "tp2xdp2", "--domain", "2")
    code, text, err = shell(*line)
    assert (code, err) == (0, "")
    assert "4 members hold, 4 want; 8 members in 4 domains" in text
    code, told, err = shell(*line, "--json")
    assert (code, err) == (0, "")
    found = json.loads(told)
    assert found["digest"] in text
    assert found["domains"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found["net_bytes"] == found["lower_bound_bytes"] > 0
    assert set(found) == set(to_json(_same_plan()))
    code, part, _ = shell(*line, "--member", "5")
    assert code == 0
    assert "member 5" in part
    code, landing, _ = shell(*line, "--landing")
    assert code == 0
    assert "landing" in landing.splitlines()[0]


def _same_plan() -> cli.Any:
    from elastic_reshard.plan import Plan, Topology

    a, b, *_ = cli._layouts("tiny", "fsdp4", "tp2xdp2")
    return Plan.between(a, b, Topology.of([0, 0, 1, 1, 2, 2, 3, 3]))


def test_planning_needs_no_torch() -> None:
    program = (
        "import sys; sys.argv[1:] = ['plan', '--model', 'tiny', '--json']\n"
        "from elastic_reshard.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["members"] == 8


@pytest.mark.usefixtures("_processes")
def test_bench_refit_measures_every_method_in_one_run(shell: Shell) -> None:
    line = [
        "bench",
        "refit",
        "--model",
        "tiny",
        "--source",
        "fsdp2",
        "--destination",
        "tp2",
        "--repeats",
        "2",
        "--json",
    ]
    code, told, err = shell(*line)
    assert code == 0
    rows = {row["method"]: row for row in json.loads(told)}
    assert len(rows) == 10
    assert "10/10" in err
    whole = 2 * 115_000
    for method, row in rows.items():
        assert 0 < row["best"] <= row["seconds"] <= max(row["samples"])
        assert row["cold"] == row["samples"][0]
        if "broadcast" in method:
            assert row["network"] > whole  # each byte more than once
    ours = {m: row for m, row in rows.items() if m.startswith("reshard")}
    assert {m: (row["network"] > 0, row["pulled"] > 0) for m, row in ours.items()} == {
        "reshard, network only": (True, False),
        "reshard, one domain, er.empty": (False, True),
        "reshard, one domain, ordinary": (False, True),
    }
    assert len({row["network"] + row["pulled"] for row in ours.values()}) == 1


def test_bench_plan_prints_its_table(shell: Shell) -> None:
    code, out, err = shell("bench", "plan", "--members", "16,32", "--repeats", "1", "--json")
    assert code == 0, err
    assert len(json.loads(out)) >= 2


@pytest.mark.long
@pytest.mark.usefixtures("_processes")
def test_bench_refit_elastic_measures_copies_latency_and_faults(shell: Shell) -> None:
    code, told, err = shell("bench", "refit", "--elastic", "--model", "tiny", "--repeats", "3", "--json")
    assert code == 0, err
    found = json.loads(told)
    model, empty = found["model"], found["empty"]
    assert [len(model[kind]) for kind in ("publish", "memcpy", "install", "pull", "everywhere")] == [3] * 5
    assert len(empty["everywhere"]) == 200
    # Two engines hold the model, one gang does; norms are on both ranks of an engine.
    assert 2.0 <= model["installed"] / model["published"] < 2.1
    assert set(model["faults"]) == {"watchdog SIGKILLed", "watchdog SIGSTOPped", "supervisor SIGKILLed"}
    assert all(0 < seconds < 30 for seconds in (*model["faults"].values(), *model["joiner"].values()))
