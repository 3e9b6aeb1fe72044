"""examples/rl, the learning half: the task, the model in its two layouts, rollouts, GRPO and its checkpoints."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import Rank, run_ranks

pytest.importorskip("transformers", reason="transformers is missing: pip install 'elastic-reshard[examples]'")

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rl.alone import refit, train
from rl.grpo import Batch, Learner, advantages, batch_of
from rl.model import build, fsdp, local, tensor_parallel, tensors, token_logprobs
from rl.sample import rollout
from rl.task import Task

EXAMPLES = Path(__file__).parents[1] / "examples"
TASK = Task()
# What float32 leaves between two orders of summing; models of unlike seeds differ by 0.1 and more.
CLOSE = 1e-5
FAR = 0.1


def plain(seed: int) -> Any:
    return build(TASK, seed)


def some_prompts(n: int = 6) -> Tensor:
    return TASK.prompts(n, torch.Generator().manual_seed(9))


def some_batch(model: Any, version: int = 7) -> Batch:
    return batch_of(rollout(model, TASK, some_prompts(), 5, seed=3), TASK, version)


def whole(model: Any) -> dict[str, Tensor]:
    """Every weight in full, copied. Collective if the model is."""
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors(model).items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


# The task


def test_reward_is_the_share_of_right_positions() -> None:
    task = Task(length=3, digits=4)
    all_prompts = list(itertools.product(range(4), repeat=3))
    all_answers = list(itertools.product(range(task.vocabulary), repeat=3))
    rows = list(itertools.product(all_prompts, all_answers))
    prompts = torch.tensor([[*prompt, task.separator] for prompt, _ in rows])
    answers = torch.tensor([answer for _, answer in rows])
    hits = [sum(a == b for a, b in zip(sorted(p), answer, strict=True)) for p, answer in rows]
    assert torch.equal(task.reward(prompts, answers), torch.tensor(hits) / 3)
    assert task.right(prompts, answers).tolist() == [n == 3 for n in hits]
    assert sum(n == 3 for n in hits) == len(all_prompts), "one right answer to each prompt"


def test_prompts_are_digits_and_a_separator_drawn_by_the_seed() -> None:
    draw = [TASK.prompts(2000, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
    assert draw[0].shape == (2000, TASK.prompt_length)
    assert set(draw[0][:, -1].tolist()) == {TASK.separator}
    counts = draw[0][:, :-1].flatten().bincount()
    assert len(counts) == TASK.digits
    assert counts.min() > 600, "800 of each digit expected, standard deviation 27"


@pytest.mark.parametrize("digits", range(2, 12))
def test_vocabulary_holds_the_separator_and_halves(digits: int) -> None:
    task = Task(digits=digits)
    assert task.vocabulary % 2 == 0
    assert task.separator == digits < task.vocabulary <= digits + 2


# One process


def test_rollout_records_the_logprobs_of_what_it_drew() -> None:
    model, prompts = plain(0), some_prompts()
    drawn = rollout(model, TASK, prompts, 5, seed=3)
    assert torch.equal(drawn.prompts, prompts.repeat_interleave(5, dim=0))
    with torch.no_grad():
        assert apart(token_logprobs(model, drawn.prompts, drawn.answers), drawn.logprobs) < CLOSE
        assert apart(token_logprobs(plain(1), drawn.prompts, drawn.answers), drawn.logprobs) > FAR
    assert torch.equal(rollout(model, TASK, prompts, 5, seed=3).answers, drawn.answers)
    assert not torch.equal(rollout(model, TASK, prompts, 5, seed=4).answers, drawn.answers)


def test_rollout_draws_by_the_models_probabilities() -> None:
    model, prompt = plain(0), some_prompts(1)
    drawn = rollout(model, TASK, prompt, 4000, seed=3).answers[:, 0].bincount(minlength=TASK.vocabulary) / 4000
    expected = model(input_ids=prompt).logits[0, -1].detach().softmax(0)
    assert expected.max() - expected.min() > 0.02, "a model that prefers some tokens"
    assert apart(drawn, expected) < 0.02  # more than four standard deviations


def test_advantages_are_normalized_within_each_prompt_however_rows_lie() -> None:
    batch = some_batch(plain(0))
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(0))
    mixed = Batch(batch.prompts[order], batch.answers[order], batch.logprobs[order], batch.rewards[order], [7] * 30)
    expected = []
    for prompt, reward in zip(mixed.prompts.tolist(), mixed.rewards.tolist(), strict=True):
        group = [r for p, r in zip(mixed.prompts.tolist(), mixed.rewards.tolist(), strict=True) if p == prompt]
        mean = sum(group) / 5
        expected.append((reward - mean) / (math.sqrt(sum((r - mean) ** 2 for r in group) / 5) + 1e-4))
    assert len({tuple(p) for p in mixed.prompts.tolist()}) == 6
    assert max(expected) > 1 > -1 > min(expected)
    assert apart(advantages(mixed), torch.tensor(expected)) < CLOSE


def test_a_step_has_the_clipped_loss_and_makes_better_answers_likelier() -> None:
    learner = Learner(plain(1), TASK)
    batch = some_batch(plain(0))  # recorded under other weights: ratios far from 1 on both sides
    before, advantage = learner.logprobs(batch), advantages(batch)
    gain, outside, largest = 0.0, 0, 0.0
    for row, column in itertools.product(range(30), range(4)):
        ratio = math.exp(before[row, column].item() - batch.logprobs[row, column].item())
        kept = min(max(ratio, 0.8), 1.2)
        outside, largest = outside + (ratio != kept), max(largest, ratio)
        gain += min(ratio * advantage[row].item(), kept * advantage[row].item())
    metrics = learner.step(batch)
    assert metrics.loss == pytest.approx(-gain / 120, abs=CLOSE)
    assert metrics.clipped == pytest.approx(outside / 120)
    assert metrics.ratio_max == pytest.approx(largest, rel=1e-4)
    assert 0 < outside < 120
    assert metrics.reward == pytest.approx(batch.rewards.mean().item())

    batch = some_batch(learner.model)
    before = learner.logprobs(batch)
    learner.step(batch)
    change = (learner.logprobs(batch) - before).sum(dim=1)
    assert (change * advantages(batch)).sum() > 0.1


def test_a_save_that_fails_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    learner = Learner(plain(0), TASK)
    learner.step(some_batch(learner.model))
    learner.save(tmp_path / "step")
    saved = whole(learner.model)
    learner.step(some_batch(learner.model))
    learner.optimizer.state[next(learner.model.parameters())]["unwritable"] = partial(lambda: None)  # no pickle
    with pytest.raises(CheckpointException, match="pickle"):
        learner.save(tmp_path / "step")
    fresh = Learner(plain(1), TASK)
    fresh.load(tmp_path / "step")
    assert fresh.steps == 1
    assert equal(whole(fresh.model), saved)
    fresh.save(tmp_path / "step")
    assert [p.name for p in tmp_path.iterdir()] == ["step"], "what the failed save left is gone"


# Two ranks. They start once and return what they saw; each test looks at a part of it.


def observe(me: Rank, folder: Path) -> bytes:
    random_state = torch.get_rng_state()
    mesh = init_device_mesh("cpu", (2,))
    seen: dict[str, Any] = {"built": whole(plain(0)), "random": torch.equal(torch.get_rng_state(), random_state)}
    one, other = some_batch(plain(0)), some_batch(plain(1))
    engine, learner = tensor_parallel(plain(0), mesh), Learner(fsdp(plain(0), mesh), TASK)
    seen["held"] = {
        side: {n: (tuple(t.shape), tuple(local(t).shape), isinstance(t, DTensor)) for n, t in tensors(m).items()}
        for side, m in (("tp", engine), ("fsdp", learner.model))
    }
    seen["tp"] = some_batch(engine)
    seen["fsdp"] = learner.logprobs(one)

    # An install writes into what `tensors` gives: afterwards the engine computes with it, norms too.
    with torch.no_grad():
        for name, weight in tensors(engine).items():
            assert isinstance(weight, DTensor)
            local(weight).mul_(1.0 + len(name) / 100)
    seen["scaled"] = token_logprobs(engine, one.prompts, one.answers).detach()
    refit(fsdp(plain(1), mesh), engine)
    seen["refit"] = token_logprobs(engine, other.prompts, other.answers).detach()

    # A snapshot, while training goes on.
    kept, under_one = learner.snapshot(), learner.logprobs(one)
    seen["metrics"] = [learner.step(one), learner.step(other)]
    seen["stepped"] = whole(learner.model)
    now = learner.logprobs(one)
    seen["moved"] = apart(now, under_one)
    seen["under"] = torch.equal(learner.logprobs_under(kept, one), under_one)
    seen["put_back"] = equal(whole(learner.model), seen["stepped"]) and torch.equal(learner.logprobs(one), now)
    seen["kept"] = equal(kept, {n: t.chunk(2)[me.rank] for n, t in seen["built"].items()})

    # A checkpoint, over what a killed attempt left; then on in this learner, and in one that resumes.
    if me.rank == 0:
        (folder / "step-2.partial").mkdir()
        (folder / "step-2.partial" / "junk").write_text("of a killed attempt")
    learner.save(folder / "step-2")
    learner.save(folder / "step-2")
    seen["on"] = [learner.step(some) for some in (one, other)], learner.steps, whole(learner.model)
    resumed = Learner(fsdp(plain(5), mesh), TASK)
    resumed.load(folder / "step-2")
    seen["resumed"] = [resumed.step(some) for some in (one, other)], resumed.steps, whole(resumed.model)
    seen["trained"] = [list(train(mesh, TASK, seed, 2, groups=8)) for seed in (0, 0, 1)]
    answer = io.BytesIO()
    torch.save(seen, answer)  # a pipe would take a tensor's descriptor, which ends with this process
    return answer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(io.BytesIO(answer), weights_only=False) for answer in run_ranks(observe, 2, folder, timeout=100)]


def test_a_seed_gives_the_same_bytes_in_every_process(seen: list[dict[str, Any]]) -> None:
    assert equal(seen[0]["built"], seen[1]["built"])
    assert equal(seen[0]["built"], whole(plain(0)))
    assert not equal(seen[0]["built"], whole(plain(1)))
    assert all(t.dtype == torch.float32 for t in seen[0]["built"].values())
    assert seen[0]["random"], "the caller's random state is kept"


def test_both_sides_name_the_same_dtensors_and_halve_them(seen: list[dict[str, Any]]) -> None:
    names = list(seen[0]["built"])
    for rank, (side, norms) in itertools.product((0, 1), (("tp", 1), ("fsdp", 2))):
        held = seen[rank]["held"][side]
        assert list(held) == names
        for name, (shape, part, is_dtensor) in held.items():
            assert is_dtensor, name
            assert shape == tuple(seen[0]["built"][name].shape)
            assert math.prod(part) * (norms if "norm" in name else 2) == math.prod(shape), name


def test_tensor_parallel_ranks_draw_what_a_plain_model_draws(seen: list[dict[str, Any]]) -> None:
    expected = some_batch(plain(0))
    for rank in (0, 1):
        assert torch.equal(seen[rank]["tp"].answers, expected.answers)
        assert torch.equal(seen[rank]["tp"].logprobs, seen[0]["tp"].logprobs), "gathered logits are the same to the bit"
        assert apart(seen[rank]["tp"].logprobs, expected.logprobs) < CLOSE
        assert seen[rank]["tp"].versions == [7] * 30


def test_what_is_written_into_an_engines_tensors_is_what_it_computes_with(seen: list[dict[str, Any]]) -> None:
    one, other, scaled = some_batch(plain(0)), some_batch(plain(1)), plain(0)
    with torch.no_grad():
        for name, weight in tensors(scaled).items():
            weight.mul_(1.0 + len(name) / 100)
        expected = token_logprobs(scaled, one.prompts, one.answers)
    assert apart(expected, one.logprobs) > FAR
    for rank in (0, 1):
        assert apart(seen[rank]["scaled"], expected) < CLOSE
        assert apart(seen[rank]["refit"], other.logprobs) < CLOSE


def test_fsdp_computes_and_steps_as_a_plain_model(seen: list[dict[str, Any]]) -> None:
    one, other, learner = some_batch(plain(0)), some_batch(plain(1)), Learner(plain(0), TASK)
    for rank in (0, 1):
        assert apart(seen[rank]["fsdp"], one.logprobs) < CLOSE
    metrics = [learner.step(one), learner.step(other)]
    for told, expected in zip(seen[0]["metrics"], metrics, strict=True):
        assert vars(told) == pytest.approx(vars(expected), rel=1e-3, abs=CLOSE)
    assert seen[0]["metrics"] == seen[1]["metrics"], "every rank tells the same"
    moved = max(apart(t, seen[0]["built"][n]) for n, t in seen[0]["stepped"].items())
    off = max(apart(t, seen[0]["stepped"][n]) for n, t in whole(learner.model).items())
    assert off < moved / 10  # Adam divides by gradients near 0, where the order of summing shows
    assert equal(seen[0]["stepped"], seen[1]["stepped"])


def test_logprobs_under_a_snapshot_are_those_of_its_time(seen: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert seen[rank]["moved"] > 1e-3
        assert seen[rank]["kept"], "this rank's shards of the weights as they were"
        assert seen[rank]["under"], "to the bit"
        assert seen[rank]["put_back"], "to the bit"


def test_a_resumed_run_goes_on_to_the_bit(seen: list[dict[str, Any]], folder: Path) -> None:
    for rank in (0, 1):
        (on, steps, weights), (again, steps_again, weights_again) = seen[rank]["on"], seen[rank]["resumed"]
        assert on == again
        assert [m.step for m in on] == [3, 4]
        assert steps == steps_again == 4
        assert equal(weights, weights_again)
    assert [p.name for p in folder.iterdir()] == ["step-2"]
    assert "junk" not in [p.name for p in (folder / "step-2").iterdir()]
    alone = Learner(plain(3), TASK)  # a gang of another size
    alone.load(folder / "step-2")
    assert alone.steps == 2
    assert equal(whole(alone.model), seen[0]["stepped"])


def test_the_same_seed_trains_alike(seen: list[dict[str, Any]]) -> None:
    first, again, other = seen[0]["trained"]
    assert first == again
    assert [m.step for m in first] == [1, 2]
    assert first[0].reward != other[0].reward
    assert first[0].ratio_max == pytest.approx(1, abs=1e-3), "drawn under the weights that the first step trains"
    assert first[1].ratio_max > 1.01, "the second step trains answers that are a step old"
    assert seen[0]["trained"] == seen[1]["trained"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_reward_rises() -> None:
    words = ["-m", "rl.alone", "--seed", str(random.Random(0).randrange(1000)), "--steps", "80"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [s["step"] for s in steps] == list(range(1, 81))
    assert sum(s["reward"] for s in steps[:5]) / 5 < 0.2, "chance is 1/12"
    assert sum(s["reward"] for s in steps[-5:]) / 5 > 0.6
