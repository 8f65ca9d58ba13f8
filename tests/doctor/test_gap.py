"""The gap of healthy engines is rounding, and what is compared is what a run would compare."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch.distributed as dist

from rollcli.config.load import load_recipe
from rollcli.doctor import gap
from rollcli.doctor.gap import FLOAT32, Chats, Gap, Limit, bench_of, load_subject, to_batch
from rollcli.engines.base import Completion
from rollcli.errors import EngineError, RecipeNotFound


def test_healthy_engines_agree(measured):
    found = measured("rollout.sampling.temperature=0.7", "rollout.sampling.top_k=5")
    assert found.gap.mean < 1e-6 and found.gap.max < 1e-4 and found.gap.effective_samples > 0.9999
    assert found.explained and found.limit is FLOAT32
    assert len(found.completions) == 8 and found.bench.skipped == []
    assert found.bench.requests[0].sampling.top_k == 5


def test_bfloat16_is_measured_by_what_it_costs_the_trainer(measured):
    found = measured("model.dtype=bfloat16")
    assert found.bench.precision == "bfloat16"
    assert found.explained and FLOAT32.mean < found.gap.mean < found.limit.mean < 0.1
    assert "bfloat16" in found.limit.why


def test_prompts_are_the_recipes_own(measured):
    found = measured(samples=2)
    text = found.bench.chat.raw_text(found.prompts[0])
    assert "+" in text and any(character.isdigit() for character in text)
    assert len({request.seed for request in found.bench.requests}) == 2


def test_the_largest_difference(measured):
    found = measured("rollout.sampling.temperature=0.7", engine="IgnoresTemperature", samples=4)
    largest = found.largest()
    assert abs(largest["trainer"] - largest["rollout"]) == pytest.approx(found.gap.max, rel=1e-5)
    assert found.completions[largest["answer"]].tokens[largest["position"]] == largest["token"]
    assert largest["text"] == found.bench.chat.raw_text(np.array([largest["token"]]))


def test_an_engine_that_answers_nothing(measured):
    with pytest.raises(EngineError, match="answered none of 8 requests: out of blocks"):
        measured(engine="Refuses")


def test_numbers_of_a_gap():
    found = Gap.between(np.array([-1.0, -2.0], np.float32), np.array([-1.5, -2.0], np.float32))
    weight = math.exp(0.5)
    assert (found.mean, found.max, found.tokens) == (0.25, 0.5, 2)
    assert found.kl == pytest.approx((weight - 1 - 0.5) / 2)
    assert found.effective_samples == pytest.approx((weight + 1) ** 2 / (2 * (weight**2 + 1)))
    with pytest.raises(EngineError):
        Gap.between(np.zeros(0), np.zeros(0))


def test_within():
    limit = Limit(0.1, 1.0, "reason")
    assert Gap(0.1, 1.0, 0, 1, 1).within(limit)
    assert not Gap(0.2, 1.0, 0, 1, 1).within(limit) and not Gap(0.1, 1.1, 0, 1, 1).within(limit)
    assert not Gap(math.nan, math.nan, 0, 1, 1).within(limit)


def test_batch_of_prompts_and_answers():
    tokens, logprobs = np.array([7, 8], np.int32), np.array([-0.5, -1.0], np.float32)
    batch = to_batch(
        [np.array([1, 2, 3], np.int32)], [Completion("a", tokens, logprobs, np.zeros(2, np.int32), "stop")]
    )
    assert batch.tokens["ids"].tolist() == [1, 2, 3, 7, 8]
    assert batch.tokens["loss_mask"].tolist() == [False] * 3 + [True] * 2
    assert batch.tokens["rollout_logprobs"][3:].tolist() == [-0.5, -1.0]


def test_chats_go_round():
    items = Chats().open("train", 0)
    assert items.size == len(items.questions) and items[1].messages[0]["role"] == "user"
    assert items.fingerprint == Chats().fingerprint


def test_a_model_is_measured_by_a_recipe_made_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLL_RUNS", str(tmp_path))
    loaded = load_subject("embedded:sums", ["rollout.sampling.temperature=0.5"])
    assert loaded.name == loaded.recipe.model.path == "embedded:sums"
    assert isinstance(loaded.recipe.tasks[0].source, Chats)
    assert loaded.recipe.rollout.sampling.temperature == 0.5


def test_a_word_that_is_nothing_is_a_recipe_not_found(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLL_RUNS", str(tmp_path))
    with pytest.raises(RecipeNotFound, match="grpo-maht") as raised:
        load_subject("grpo-maht")
    assert "`grpo-math`" in raised.value.hint


def test_a_run_is_measured_by_its_own_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLL_RUNS", str(tmp_path))
    run = tmp_path / "mine-7f3a"
    run.mkdir()
    (run / "status.json").write_text("{}")
    (run / "config.yaml").write_text(load_recipe("grpo-math").path.read_text())
    assert load_subject("mine-7f3a").recipe.model.path == "mine-7f3a"
    assert load_subject("mine@20").recipe.model.path == "mine-7f3a@20"
    assert load_subject("mine-7f3a").recipe.tasks[0].name == "sums"


def test_the_group_and_the_threads_are_given_back():
    assert not dist.is_initialized()
    with bench_of(load_subject("sft-tiny", ["policy.threads=1"]), 2, 8) as bench:
        assert dist.is_initialized() and len(bench.requests) == 2
        assert bench.temperature == 1.0 and bench.rollout.engine == "transformers"
        assert gap.measure(bench).explained
    assert not dist.is_initialized()


def test_environments_open_the_chat(tmp_path):
    (tmp_path / "shop.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Shop:\n"
        "    async def reset(self, task):\n"
        "        return [{'role': 'user', 'content': f'buy {task.seed % 1}'}]\n"
        "    async def step(self, response): ...\n"
        "    async def close(self): ...\n"
    )
    loaded = load_recipe("grpo-math", [f"tasks[0].environment={tmp_path}/shop.py:Shop"])
    assert gap._chats(loaded.recipe, 2) == [[{"role": "user", "content": "buy 0"}]] * 2
