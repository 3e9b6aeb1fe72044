"""The RL example: its pure parts, and (long) its short form as a whole, on a real Ray cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.buffer import Buffer, Chunk, Weights
from rl.schedule import Fault, Schedule
from rl.settings import RunFailed
from rl.trace import Trace, read

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NEEDS = "the RL example needs transformers and matplotlib: pip install 'elastic-reshard[examples]'"


# -- the buffer


def chunk(ticket: int, owner: str, line: str, step: int, version: int = 0) -> Chunk:
    return Chunk(ticket, owner, Weights(line, step, version or step + 1))


def weights(line: str, step: int) -> Weights:
    return Weights(line, step, step + 1)


def begun(chunks: int = 2, max_lag: int = 1, step: int = 0) -> Buffer:
    buffer = Buffer(chunks, max_lag)
    buffer.begin("a", step)
    return buffer


def sample(buffer: Buffer, owner: str, line: str, step: int) -> int:
    """An engine does what it is given."""
    ticket = asked(buffer, owner, line, step)
    assert buffer.put(chunk(ticket, owner, line, step))
    return ticket


def asked(buffer: Buffer, owner: str, line: str, step: int) -> int:
    """There is something to do for an engine."""
    ticket = buffer.ask(owner, weights(line, step))
    assert ticket is not None
    return ticket


def taken(buffer: Buffer, line: str) -> list[Chunk]:
    """There is a whole batch."""
    chunks = buffer.take(line)
    assert chunks is not None
    return chunks


def test_a_batch_is_given_when_it_is_whole_and_no_more_is_sampled_than_one_ahead() -> None:
    buffer = begun()
    assert sample(buffer, "e0", "a", 0) == 0
    assert buffer.take("a") is None
    assert sample(buffer, "e1", "a", 0) == 1
    assert buffer.ask("e0", weights("a", 0)) is None, "a whole batch waits"
    assert [c.ticket for c in taken(buffer, "a")] == [0, 1]
    assert [c.ticket for c in taken(buffer, "a")] == [0, 1], "asked again: the same"
    assert sample(buffer, "e0", "a", 0) == 2
    assert buffer.trained("a", 1)
    assert buffer.done == {1: (0, 1)}


def test_what_would_be_too_old_is_not_begun_and_what_became_too_old_is_dropped() -> None:
    buffer = begun(chunks=1)
    for step in (0, 1):
        sample(buffer, "e0", "a", step)
        assert buffer.take("a")
        assert buffer.trained("a", step + 1)
    assert buffer.ask("e0", weights("a", 0)) is None, "two steps behind"
    late = asked(buffer, "slow", "a", 1)
    buffer.step = 3  # others were quicker
    assert buffer.put(chunk(late, "slow", "a", 1))
    assert buffer.counts["dropped_old"] == 1
    assert buffer.ready == []
    assert buffer.ask("e0", weights("a", 3)) == late, "its prompts are drawn again"


def test_what_a_lost_engine_had_to_do_is_done_by_another_and_its_samples_are_refused() -> None:
    buffer = begun()
    lost = asked(buffer, "e0", "a", 0)
    buffer.forget("e0")
    assert buffer.ask("e1", weights("a", 0)) == lost
    assert not buffer.put(chunk(lost, "e0", "a", 0)), "a zombie"
    assert buffer.put(chunk(lost, "e1", "a", 0))
    assert not buffer.put(chunk(lost, "e1", "a", 0)), "twice"
    assert buffer.counts["refused"] == 2


def test_a_late_ticket_is_done_by_two_and_taken_once() -> None:
    buffer = begun()
    late = asked(buffer, "e0", "a", 0)
    sample(buffer, "e1", "a", 0)
    assert buffer.ask("e1", weights("a", 0)) is None
    assert buffer.ask("e0", weights("a", 0), [late]) is None, "its own"
    assert buffer.ask("e1", weights("a", 0), [late]) == late
    assert buffer.ask("e2", weights("a", 0), [late]) is None, "two are enough"
    buffer.forget("e1")
    assert buffer.put(chunk(late, "e0", "a", 0))
    assert buffer.leased == {}


def test_a_gang_that_goes_back_undoes_steps_and_takes_nothing_of_the_lost_line() -> None:
    buffer = begun(chunks=1)
    for step in (0, 1, 2):
        sample(buffer, "e0", "a", step)
        assert buffer.take("a")
        assert buffer.trained("a", step + 1)
    sample(buffer, "e0", "a", 3)
    buffer.begin("b", 1)
    assert buffer.counts["lost_steps"] == 2
    assert buffer.counts["dropped_line"] == 1
    assert sorted(buffer.todo) == [1, 2, 3]
    assert buffer.ask("e0", weights("a", 1)) is None, "the same step, but of the lost line"
    assert sample(buffer, "e0", "b", 1) == 1
    assert buffer.take("a") is None, "the former gang is fenced off"
    assert not buffer.trained("a", 2)
    assert [c.weights.line for c in taken(buffer, "b")] == ["b"]
    assert buffer.trained("b", 2)
    assert buffer.done == {1: (0,), 2: (1,)}


def test_what_a_gang_had_in_hand_when_it_died_is_drawn_again() -> None:
    buffer = begun()
    for owner in ("e0", "e1"):
        sample(buffer, owner, "a", 0)
    assert len(taken(buffer, "a")) == 2
    buffer.begin("b", 0)
    assert [sample(buffer, "e0", "b", 0) for _ in range(2)] == [0, 1]


def test_while_a_step_is_trained_its_successor_is_sampled_for() -> None:
    """What is begun now trains one step later than what is in hand."""
    buffer = begun(chunks=1)
    sample(buffer, "e0", "a", 0)
    assert taken(buffer, "a")
    assert buffer.trained("a", 1)
    sample(buffer, "e0", "a", 0)
    assert taken(buffer, "a")
    assert buffer.ask("e0", weights("a", 0)) is None, "it would be two steps old"
    assert buffer.ask("e0", weights("a", 1)) is not None


def test_a_version_that_nobody_has_any_more_is_dropped_and_counted() -> None:
    buffer = begun()
    sample(buffer, "e0", "a", 0)
    ticket = asked(buffer, "e1", "a", 0)
    buffer.put(chunk(ticket, "e1", "a", 0, version=7))
    assert len(taken(buffer, "a")) == 2
    buffer.unusable("a", 7)
    assert buffer.counts["dropped_unchecked"] == 1
    assert [c.ticket for c in buffer.ready] == [0]
    assert not buffer.trained("a", 1), "there is nothing in hand"


_events = st.lists(
    st.tuples(
        st.sampled_from(["ask", "put", "late", "forget", "take", "trained", "begin", "unusable"]), st.integers(0, 3)
    ),
    max_size=120,
)


@given(_events)
def test_no_ticket_is_lost_or_trained_twice(events: list[tuple[str, int]]) -> None:
    buffer, lines, given_out = begun(), 1, dict[tuple[int, str], Weights]()
    for what, number in events:
        line = f"{lines}"
        owner, now = f"e{number}", weights(buffer.line, max(0, buffer.step - number % 2))
        if what in ("ask", "late"):
            ticket = buffer.ask(owner, now, list(buffer.leased) if what == "late" else ())
            if ticket is not None:
                given_out[ticket, owner] = now
        elif what == "put" and given_out:
            (ticket, owner), drawn = given_out.popitem()
            buffer.put(Chunk(ticket, owner, drawn))
        elif what == "forget":
            buffer.forget(owner)
        elif what == "take":
            buffer.take(buffer.line)
        elif what == "trained":
            for taken in buffer.taken:
                assert taken.weights.line == buffer.line
                assert buffer.step - taken.weights.step <= 1
            buffer.trained(buffer.line, buffer.step + 1)
        elif what == "unusable" and buffer.taken:
            buffer.unusable(buffer.line, buffer.taken[0].weights.version)
        elif what == "begin":
            lines += 1
            buffer.begin(line, max(0, buffer.step - number))
        held = [*buffer.todo, *buffer.leased, *(c.ticket for c in (*buffer.ready, *buffer.taken))]
        held += [ticket for tickets in buffer.done.values() for ticket in tickets]
        assert sorted(held) == list(range(buffer.fresh)), "each ticket is in one place"
        assert sorted(buffer.done) == list(range(1, buffer.step + 1)), "each step is there once"


# -- the schedule


def test_faults_come_once_in_order_by_step_or_time() -> None:
    first, then, last = (
        Fault("kill", "spot-0", at_step=4),
        Fault("add", "spot-1", after=2.0),
        Fault("kill", "gang-0", at_step=4),
    )
    schedule = Schedule((first, then, last))
    assert schedule.due(3, 100.0) == []
    assert schedule.due(5, 101.0) == [first]
    assert schedule.due(9, 102.9) == [], "what follows waits for what is before it"
    assert schedule.due(9, 103.0) == [then, last]
    assert schedule.due(99, 999.0) == []
    assert schedule.left == 0


# -- what a run's events say


def steady(first: int, last: int, begin: float, pace: float, line: str = "a") -> list[dict[str, Any]]:
    """Steps at an even pace; each version is published with its step and installed by both groups 0.2 s later."""
    found: list[dict[str, Any]] = []
    for i, step in enumerate(range(first, last + 1)):
        t = begin + i * pace
        found.append({"t": t, "event": "step", "line": line, "step": step, "reward": step / 100, "lag": 1.0,
                      "checked": 10, "difference": 1e-7 * step})  # fmt: skip
        found.append({"t": t, "event": "publish", "line": line, "step": step})
        install = {"t": t + 0.2, "event": "install", "line": line, "step": step}
        found += [install | {"group": group} for group in ("engine-0", "engine-1")]
    return found


RUN = {"t": 0.0, "event": "run", "mode": "elastic", "seed": 0, "engines": 2}


def test_a_run_without_faults() -> None:
    trace = Trace([RUN, *steady(1, 20, 10.0, 1.0)])
    assert trace.costs() == []
    assert trace.seconds == pytest.approx(19.0)
    assert trace.final_reward == pytest.approx(0.155), "the mean of steps 11 to 20"
    assert trace.checked == 200
    assert trace.difference == pytest.approx(2e-6)
    assert [seconds for _, seconds in trace.refits()] == pytest.approx([0.2] * 20)


def test_what_the_trainers_loss_costs() -> None:
    """Step 20 was done at 29 s; the fault comes half a second later; 16 to 20 are trained again from 60 s on."""
    events = [
        *steady(1, 20, 10.0, 1.0),
        {"t": 29.5, "event": "fault", "what": "kill", "node": "gang-0"},
        {"t": 59.0, "event": "begin", "line": "b", "step": 15},
        *steady(16, 40, 60.0, 1.0, "b"),
    ]
    (cost,) = Trace([RUN, *events]).costs()
    assert (cost.step, cost.pace, cost.at) == (20, 1.0, 19.5)
    # Recovered with step 21, at 65 s: without the fault that had been done at 30 s.
    assert cost.recovery == pytest.approx(35.5)
    assert cost.lost == pytest.approx(34.5)


def test_what_an_engines_loss_costs_while_training_goes_on() -> None:
    """The other engine serves on, at the former pace: nothing is lost, but recovery is when both serve again."""
    events = steady(1, 40, 10.0, 1.0)
    events = [e for e in events if e["event"] != "install" or e["group"] == "engine-0" or not 29.5 < e["t"] < 39.0]
    events += [
        {"t": 29.5, "event": "fault", "what": "kill", "node": "spot-0"},
        {"t": 31.0, "event": "engine.gone", "group": "engine-1"},
    ]
    (cost,) = Trace([RUN, *events]).costs()
    # engine-1 serves step 30 from 39.2 s on; the next step is at 40 s.
    assert cost.recovery == pytest.approx(10.5)
    assert cost.lost == pytest.approx(-0.5), "within half a step of nothing"


def test_a_notice_costs_until_the_group_serves_elsewhere() -> None:
    """Told at 29.5 s, it goes on serving until it leaves at 33, and serves again at 39.2."""
    events = steady(1, 40, 10.0, 1.0)
    away = [e for e in events if e["event"] == "install" and e["group"] == "engine-1" and 33.0 < e["t"] < 39.0]
    events = [e for e in events if e not in away]
    events += [
        {"t": 29.5, "event": "fault", "what": "drain", "node": "spot-1"},
        {"t": 33.0, "event": "engine.gone", "group": "engine-1"},
        {"t": 34.5, "event": "fault", "what": "kill", "node": "spot-1", "noticed": True},
    ]
    (cost,) = Trace([RUN, *events]).costs()
    assert cost.what == "drain"
    assert cost.recovery == pytest.approx(10.5)


def test_a_slow_pace_after_a_fault_is_not_recovery() -> None:
    fault = {"t": 29.5, "event": "fault", "what": "kill", "node": "gang-0"}
    begin = {"t": 30.0, "event": "begin", "line": "b", "step": 20}
    slow = Trace([RUN, *steady(1, 20, 10.0, 1.0), fault, begin, *steady(21, 40, 31.0, 1.6, "b")])
    (cost,) = slow.costs()
    assert cost.recovery is None
    assert cost.lost is None
    near = Trace([RUN, *steady(1, 20, 10.0, 1.0), fault, begin, *steady(21, 40, 31.0, 1.4, "b")])
    assert near.costs()[0].recovery is not None


def test_an_engine_that_never_comes_back_is_not_recovery() -> None:
    events = steady(1, 40, 10.0, 1.0)
    events = [e for e in events if e["event"] != "install" or e["group"] == "engine-0" or e["t"] < 29.5]
    events += [
        {"t": 29.5, "event": "fault", "what": "kill", "node": "spot-0"},
        {"t": 31.0, "event": "engine.gone", "group": "engine-1"},
    ]
    (cost,) = Trace([RUN, *events]).costs()
    assert cost.lost is None


def test_the_report_is_drawn_and_told(tmp_path: Path) -> None:
    pytest.importorskip(
        "matplotlib", reason="the example's report needs matplotlib: pip install 'elastic-reshard[examples]'"
    )
    for mode in ("elastic", "baseline"):
        (tmp_path / mode).mkdir()
        end = {"t": 99.0, "event": "end", "counts": {"lost_steps": 5, "dropped_line": 3}, "done": {}}
        fault = {"t": 29.5, "event": "fault", "what": "kill", "node": "gang-0"}
        begin = {"t": 59.0, "event": "begin", "line": "b", "step": 15}
        events = [RUN | {"mode": mode}, *steady(1, 20, 10.0, 1.0), fault, begin, *steady(16, 40, 60.0, 1.0, "b"), end]
        (tmp_path / mode / "events.jsonl").write_text("\n".join(map(json.dumps, events)) + '\n{"cut of')
    # In a process of its own: matplotlib keeps fonts open.
    show = "import sys, pathlib, rich.console as c, rl.report as r; r.report(pathlib.Path(sys.argv[1]), c.Console(width=160))"
    command = [sys.executable, "-c", show, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(EXAMPLES)}
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert re.search(r"kill gang-0 at step 20\s*│\s*35.5 / 34.5\s*│\s*35.5 / 34.5", told), told
    assert re.search(r"elastic\s*│\s*0\s*│\s*40\s*│.*│\s*0.355\s*│\s*5\s*│", told), told


# -- the check of versions


def test_samples_of_another_version_than_they_name_are_found() -> None:
    pytest.importorskip("transformers", reason=NEEDS)
    import torch

    from rl.checking import batch_of_chunks, check
    from rl.grpo import Learner, batch_of
    from rl.model import build
    from rl.sample import rollout
    from rl.task import Task

    task = Task()
    model = build(task, 0)
    learner = Learner(model, task)
    prompts = task.prompts(4, torch.Generator().manual_seed(1))

    def drawn(version: int) -> Chunk:
        batch = batch_of(rollout(model, task, prompts, 2, version), task, version)
        arrays = [x.numpy() for x in (batch.prompts, batch.answers, batch.logprobs, batch.rewards)]
        return Chunk(version, "engine-0/x", Weights("a", version - 1, version), *arrays)

    snapshots, chunks = {}, []
    for version in (1, 2):
        snapshots[version] = learner.snapshot()
        chunks.append(drawn(version))
        learner.step(batch_of_chunks([chunks[-1]]))
    worst, checked = check(learner, snapshots, chunks, 1e-4)
    assert checked == 16
    assert worst < 1e-5
    swapped = {1: snapshots[1], 2: snapshots[1]}
    with pytest.raises(RunFailed, match=r"version 2 \(step-1\).*engine-0/x has served something else"):
        check(learner, swapped, chunks, 1e-4)
    mixed = {1: snapshots[1], 2: snapshots[2] | {(name := next(iter(snapshots[1]))): snapshots[1][name]}}
    with pytest.raises(RunFailed, match="version 2"):
        check(learner, mixed, chunks, 1e-4)
    nan = {1: snapshots[1], 2: {name: tensor * float("nan") for name, tensor in snapshots[2].items()}}
    with pytest.raises(RunFailed, match="differ by nan"):
        check(learner, nan, chunks, 1e-4)


# -- the whole


def play(mode: str, out: Path) -> Trace:
    """The short form, as its docstring says; its trace, of which all is asserted that holds in every mode."""
    for needed in ("transformers", "matplotlib"):
        pytest.importorskip(needed, reason=NEEDS)
    assert "    python examples/rl_preemptible.py --short\n" in (EXAMPLES / "rl_preemptible.py").read_text()
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "rl_preemptible.py"), "--short", "--mode", mode, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (out / "report.png").exists()
    trace = read(out / f"{mode}-seed0" / "events.jsonl")
    assert sorted(trace.final()) == list(range(1, 15)), "every step was trained"
    assert all(step["checked"] == 512 for step in trace.steps), "every sample was checked"
    assert trace.difference <= 1e-4
    assert all(step["lag_max"] <= 1 for step in trace.steps)
    assert [fault["node"] for fault in trace.faults()] == ["spot-0", "gang-0"]
    (end,) = [e for e in trace.events if e["event"] == "end"]
    tickets = [ticket for of_step in end["done"].values() for ticket in of_step]
    assert len(tickets) == len(set(tickets)) == 28, "no ticket is lost or trained on twice"
    served = {e["group"]: e["step"] for e in trace.events if e["event"] == "install"}
    assert served == {"engine-0": 14, "engine-1": 14}, "both engines serve the last step"
    return trace


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_short_form(tmp_path: Path) -> None:
    """An engine's node and the trainers' node are killed; every sample is checked; every ticket is trained on once."""
    trace = play("elastic", tmp_path)
    begins = [e for e in trace.events if e["event"] == "begin"]
    assert len(begins) == 2, "the gang was killed once, and came back"
    assert 0 < begins[1]["step"] <= 8, "from an older checkpoint"
    installs = [e for e in trace.events if e["event"] == "install"]
    gone = [e["group"] for e in trace.events if e["event"] == "engine.gone"]
    assert len(gone) == 1, "the other engine did not notice"
    (stayed,) = {"engine-0", "engine-1"} - set(gone)
    versions = [e["version"] for e in installs if e["group"] == stayed]
    assert versions == sorted(set(versions)), "weight_version only rises"
    first = min(e["version"] for e in installs if e["line"] == begins[1]["line"])
    assert first > max(e["version"] for e in installs if e["line"] == begins[0]["line"]), (
        "an older label, a newer version"
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_short_form_of_the_baseline(tmp_path: Path) -> None:
    """The same faults: everything is started three times."""
    trace = play("baseline", tmp_path)
    assert len([e for e in trace.events if e["event"] == "begin"]) == 3
    assert {e["group"] for e in trace.events if e["event"] == "engine.gone"} == {"engine-0", "engine-1"}
