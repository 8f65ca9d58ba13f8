"""Recipes and models that the tests of `devices/` plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.ppo import Ppo
from rollcli.algorithms.remax import ReMax
from rollcli.config.schema import (
    CriticConfig,
    ModelConfig,
    PolicyConfig,
    RewardConfig,
    RewardModelConfig,
    RlRecipe,
    RolloutConfig,
    SamplingConfig,
    SftRecipe,
    TaskConfig,
)
from rollcli.devices.chips import Chip
from rollcli.devices.facts import ModelFacts, facts_from_config
from rollcli.devices.hardware import Hardware, Pool

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 5, "vocab_size": 512, "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}  # fmt: skip
QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.fixture
def tiny() -> ModelFacts:
    """The shapes of stories260K."""
    return facts_from_config(TINY, "tiny")


@pytest.fixture
def qwen() -> ModelFacts:
    """The shapes of Qwen2.5-7B."""
    return facts_from_config(QWEN_7B, "Qwen/Qwen2.5-7B")


@pytest.fixture
def gpus() -> Callable[[int, float], Hardware]:
    """Makes some devices of a chip with the memory in GiB that a test cares about."""
    return lambda count, memory: Hardware((Pool(Chip("x", memory, 1000, 100, 0, 0, 10), count),))


@pytest.fixture
def rl() -> Callable[..., RlRecipe]:
    """Makes a recipe of the sizes a test cares about."""

    def make(
        *, workers: int = 1, replicas: int = 1, kl: float = 0.0, placement: str | dict[str, str] = "auto",
        prompts: int = 64, group: int = 8, minibatches: int = 4, prompt: int | None = 128, answer: int = 256,
        tokens: int = 16384, recompute: bool = False, packing: bool = True, max_rows: int = 256,
        critic: int = 0, epochs: int = 1, estimator: str = "k3", greedy: bool = False,
        reward_models: Sequence[RewardModelConfig] = (),
    ) -> RlRecipe:  # fmt: skip
        penalty = KlPenalty(coefficient=kl, estimator=estimator)
        return RlRecipe(
            model=ModelConfig("tiny"),
            tasks=[TaskConfig("sums", source=None, rewards=[RewardConfig("math")])],
            steps=1,
            policy=PolicyConfig(
                workers=workers, micro_batch_tokens=tokens, recompute_activations=recompute, packing=packing
            ),
            placement=placement,
            algorithm=(Ppo if critic else ReMax if greedy else Grpo)(kl=penalty),
            reward_models=list(reward_models),
            critic=CriticConfig(workers=max(critic, 1), micro_batch_tokens=tokens),
            epochs=epochs,
            prompts_per_step=prompts,
            group_size=group,
            minibatches=minibatches,
            rollout=RolloutConfig(
                replicas=replicas, max_rows=max_rows, max_prompt_tokens=prompt,
                sampling=SamplingConfig(max_tokens=answer),
            ),
        )  # fmt: skip

    return make


@pytest.fixture
def sft() -> Callable[..., SftRecipe]:
    """Makes a supervised recipe."""

    def make(*, workers: int = 1, sequences: int = 64, tokens: int = 4096) -> SftRecipe:
        return SftRecipe(
            model=ModelConfig("tiny"),
            tasks=[TaskConfig("sums", source=None)],
            steps=1,
            pipeline="sft",
            policy=PolicyConfig(workers=workers, micro_batch_tokens=tokens),
            sequences_per_step=sequences,
        )

    return make
