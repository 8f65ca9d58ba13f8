"""What test_fsdp.py and test_invariance.py share with the ranks they start.

Models, batches, a slow reference, the cases of invariance, and what a rank does.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import transformers

from rollcli import registry
from rollcli.algorithms import BUILTIN
from rollcli.algorithms.aggregation import MODES
from rollcli.algorithms.base import Algorithm
from rollcli.algorithms.correction import Correction
from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.masking import Masking
from rollcli.algorithms.ppo import Ppo
from rollcli.algorithms.reinforce import Reinforce
from rollcli.algorithms.shaping import Shaping
from rollcli.config.schema import ModelConfig, OptimizerConfig, PolicyConfig
from rollcli.data.batch import Batch
from rollcli.engines.fsdp import FsdpEngine
from rollcli.engines.models import load_critic, load_policy
from rollcli.engines.objectives import LogProbs, Values
from rollcli.pipelines.rl import RlPipeline

TEMPERATURE = 0.7
VOCABULARY = 61
PROMPT = 2


class Watched(FsdpEngine):
    """Keeps the gradient of the last update as it was before clipping, and names what tests do most."""

    def train(self, batch: Batch, algorithm: Algorithm, temperature: float = TEMPERATURE) -> dict[str, float]:
        """One update of the policy at the recipe's learning rate; returns its metrics."""
        return self.update(batch, LogProbs(temperature, algorithm), self.config.optimizer.learning_rate)[0]

    def logprobs(self, batch: Batch, temperature: float = TEMPERATURE) -> np.ndarray:
        """Log-probabilities `[T]`."""
        return self.forward(batch, LogProbs(temperature))

    def clip(self) -> float:
        self.gradients = {
            name: parameter.grad.full_tensor().clone() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            for name, parameter in self.model.named_parameters()
        }
        return super().clip()


def write_model(folder: Path, kind: str = "llama", **options) -> Path:
    """Writes a small random model: Llama, or Qwen 2 with biases and tied embeddings."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}  # fmt: skip
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, tie_word_embeddings=True, **options))
        torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias)
    model.save_pretrained(folder)
    return folder


def make_engine(
    folder: Path, dtype: str = "auto", frozen: bool = False, critic: str | Path | None = None, **policy
) -> Watched:
    """An engine on the model in `folder`; options are those of `PolicyConfig`, or `optimizer`'s.

    `critic` is a folder a critic is loaded from.
    """
    optimizer = {"learning_rate": 1e-2, "max_grad_norm": 1e9}
    optimizer |= {name: policy.pop(name) for name in list(policy) if name in OptimizerConfig.__dataclass_fields__}
    config = PolicyConfig(optimizer=OptimizerConfig(**optimizer), **{"micro_batch_tokens": 64, **policy})
    model, device = ModelConfig(str(folder)), torch.device("cpu")
    loaded = (
        load_policy(model, device, 0, training=True) if critic is None else load_critic(model, str(critic), device, 0)
    )
    return Watched(loaded, config, frozen=frozen, dtype=dtype)


def make_batch(lengths: tuple[int, ...] = (7, 30, 4, 12, 12, 19, 3, 25, 9, 5), seed: int = 0) -> Batch:
    """Trajectories of two groups: some of two turns, some off-policy enough to be clipped, one all masked.

    All columns are there that a step has before `prepare`, and those of every forward pass.
    """
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total, count = int(offsets[-1]), len(lengths)
    batch = Batch(
        offsets,
        {"ids": random.integers(3, VOCABULARY, total).astype(np.int32)},
        {"group": np.arange(count) % 2, "reward": random.integers(0, 3, count).astype(np.float64)},
    )
    place = np.arange(total) - offsets[batch.rows]
    tokens, samples = batch.tokens, batch.samples
    tokens["loss_mask"] = (place >= PROMPT) & (place % 8 != 5) & (batch.rows != 4)
    tokens["old_logprobs"] = (-4.1 + 0.4 * random.normal(size=total)).astype(np.float32)
    tokens["reference_logprobs"] = (-4.1 + 0.4 * random.normal(size=total)).astype(np.float32)
    tokens["rollout_logprobs"] = tokens["old_logprobs"] + (0.25 + 0.1 * random.normal(size=total)).astype(np.float32)
    scores = random.normal(size=(total, VOCABULARY))
    tokens["reference_distribution"] = (scores - np.log(np.exp(scores).sum(1, keepdims=True))).astype(np.float32)
    tokens["values"] = (0.3 * random.normal(size=total)).astype(np.float32)
    tokens["versions"] = np.zeros(total, np.int32)
    # An observed token ends a turn; a turn is taken in one of two states.
    tokens["turns"] = np.where(tokens["loss_mask"], (place + 2) // 8, -1).astype(np.int32)
    tokens["states"] = np.where(tokens["loss_mask"], (batch.rows // 2 + tokens["turns"]) % 2, -1).astype(np.int64)
    last = tokens["loss_mask"] & (np.append(tokens["turns"][1:], -1) != tokens["turns"])
    tokens["turn_rewards"] = np.where(last, random.normal(size=total), 0.0)
    samples["sample"] = np.arange(count) // 2
    samples["accuracy"] = (samples["reward"] > 0).astype(np.float64)
    samples["sampled"] = batch.trained_lengths
    samples["budget"] = np.full(count, 24)
    samples["truncated"] = np.arange(count) == 7
    samples["greedy_reward"] = np.array([0.5, 1.0])[samples["group"]]
    return weighed(batch, Grpo())


def weighed(batch: Batch, algorithm: Algorithm) -> Batch:
    """Adds what the pipeline adds before an update."""
    algorithm.prepare(batch)
    batch.tokens["advantages"] = algorithm.advantages(batch)
    batch.tokens["loss_weights"] = algorithm.loss_weights(batch)
    return batch


def valued(batch: Batch) -> Batch:
    """Adds what a critic learns from."""
    weighed(batch, Ppo())
    batch.tokens["returns"] = Ppo().returns(batch)
    return batch


def as_pipeline(batch: Batch, algorithm: Algorithm, epochs: int = 2) -> list[Batch]:
    """The step's one minibatch, once for each epoch, as the pipeline itself makes it of what was sampled."""
    if algorithm.demonstrations:
        batch.tokens["loss_weights"] = algorithm.loss_weights(batch)
        return [batch] * epochs
    step = SimpleNamespace(
        algorithm=algorithm,
        roles=SimpleNamespace(critic=True if "critic" in algorithm.needs() else None),
        recipe=SimpleNamespace(epochs=epochs, minibatches=1, seed=0),
        steps_done=0,
    )
    algorithm.prepare(batch)
    if algorithm.old_from_rollout:
        batch.tokens["old_logprobs"] = batch.tokens["rollout_logprobs"]
    for passed in {"reference", "reference_distribution"} - algorithm.needs():
        batch.tokens.pop({"reference": "reference_logprobs"}.get(passed, passed), None)
    return asyncio.run(RlPipeline.weigh.__wrapped__(step, batch))


def grpo(**options) -> Callable[[], Grpo]:
    return lambda: Grpo(**options)


CASES: dict[str, Callable[[], Algorithm]] = {
    **{name: registry.resolve("algorithms", name) for name in BUILTIN},
    **{mode: grpo(aggregation=mode) for mode in MODES},
    "divisor": grpo(aggregation="seq-mean-token-sum-norm", divisor=7),
    "entropy": grpo(entropy_coefficient=0.3),
    **{f"kl {name}": grpo(kl=KlPenalty(0.5, name)) for name in ("k1", "k2", "k3", "k3+", "full")},
    "kl unbiased": grpo(kl=KlPenalty(0.5, "k3", unbiased_gradient=True)),
    "kl in reward": grpo(kl=KlPenalty(0.5, "k3", place="reward")),
    **{f"truncate {level}": grpo(correction=Correction("truncate", level, high=0.8))
       for level in ("token", "sequence", "geometric")},
    **{f"mask {level}": grpo(correction=Correction("mask", level, low=0.1, high=0.8))
       for level in ("token", "sequence", "geometric")},
    "old from rollout": grpo(correction=Correction(old_logprobs="rollout")),
    "last turn": grpo(masking=Masking(turns="last", truncated=True)),
    "sample weights": grpo(masking=Masking(difficulty_weight=1.0, length_weight=0.5), dual_clip=3.0),
    "shaping": grpo(shaping=Shaping(clip=[0.1, 1.8], mean="running", std="group", overlong_buffer=0.5)),
    "whiten and clip": grpo(whiten=True, advantage_clip=0.7, scale="batch"),
    "whole star_po": lambda: registry.resolve("algorithms", "star_po")(keep_share=1.0),
    "turns": lambda: Reinforce(returns_of="turn", gamma=0.9),
    "tokens": lambda: Reinforce(returns_of="token", gamma=0.9),
    "critic": lambda: Ppo(aggregation="seq-mean-token-mean"),
    "critic without clip": lambda: Ppo(value_clip=None, gamma=0.9),
}  # fmt: skip
"""Every algorithm, every aggregation, every option that changes a loss. Those of `critic` train one."""


def gradient_of(engine: Watched, shard: Batch, name: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradient of a case on one rank's shard; a learning rate of 0 keeps the weights for the next."""
    algorithm = CASES[name]()
    objective = Values(algorithm) if name.startswith("critic") else LogProbs(TEMPERATURE, algorithm)
    metrics, _ = engine.update(shard, objective, 0.0)
    return metrics, engine.gradients


def write_critic(folder: Path, model: Path) -> Path:
    """Writes a critic on the model whose head is not 0, so that its gradient reaches the backbone."""
    critic = load_critic(ModelConfig(str(model)), None, torch.device("cpu"), 0)
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.score.weight, std=0.3)
    critic.save_pretrained(folder)
    return folder


def reference_logprobs(model: torch.nn.Module, batch: Batch, temperature: float = TEMPERATURE) -> list[torch.Tensor]:
    """Log-probability of every token after the first, one trajectory at a time, as the textbook has it."""
    result = []
    for row in range(len(batch)):
        ids = torch.tensor(batch.tokens["ids"][batch.offsets[row] : batch.offsets[row + 1]].astype(np.int64))
        logits = model(ids[None]).logits[0, :-1].float() / temperature
        result.append(torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]])
    return result


def reference_grpo(model: torch.nn.Module, batch: Batch, beta: float = 0.04, clip: float = 0.2) -> torch.Tensor:
    """GRPO's objective written token by token (arXiv 2402.03300, eq. 3), negated."""
    answers = []
    for row, logprobs in enumerate(reference_logprobs(model, batch)):
        members = batch.samples["reward"][batch.samples["group"] == batch.samples["group"][row]]
        advantage = float((batch.samples["reward"][row] - members.mean()) / members.std(ddof=1))
        losses = []
        for token in range(int(batch.offsets[row]) + 1, int(batch.offsets[row + 1])):
            if not batch.tokens["loss_mask"][token]:
                continue
            logprob = logprobs[token - int(batch.offsets[row]) - 1]
            ratio = torch.exp(logprob - float(batch.tokens["old_logprobs"][token]))
            gain = torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - clip, 1 + clip) * advantage)
            apart = float(batch.tokens["reference_logprobs"][token]) - logprob
            losses.append(-gain + beta * (torch.exp(apart) - apart - 1))
        if losses:
            answers.append(sum(losses) / len(losses))
    return sum(answers) / len(answers)


def reference_values(model: torch.nn.Module, batch: Batch) -> list[torch.Tensor]:
    """The critic's value of the state before every token after the first, one trajectory at a time."""
    result = []
    for row in range(len(batch)):
        ids = torch.tensor(batch.tokens["ids"][batch.offsets[row] : batch.offsets[row + 1]].astype(np.int64))
        result.append(model(ids[None]).logits[0, :-1, 0])
    return result


def reference_value_loss(model: torch.nn.Module, batch: Batch, clip: float = 0.2) -> torch.Tensor:
    """PPO's value loss written token by token (its module's docstring)."""
    losses = []
    for row, values in enumerate(reference_values(model, batch)):
        for token in range(int(batch.offsets[row]) + 1, int(batch.offsets[row + 1])):
            if batch.tokens["loss_mask"][token]:
                value = values[token - int(batch.offsets[row]) - 1]
                old, wanted = float(batch.tokens["values"][token]), float(batch.tokens["returns"][token])
                bounded = torch.clamp(value, old - clip, old + clip)
                losses.append(torch.maximum((value - wanted) ** 2, (bounded - wanted) ** 2) / 2)
    return sum(losses) / len(losses)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def my_share(batch: Batch, indices: list[list[int]] | None = None) -> Batch:
    """This rank's part of a batch."""
    shards = batch.shards(dist.get_world_size()) if indices is None else [np.array(part, int) for part in indices]
    return batch.select(shards[dist.get_rank()])


def run_two(work: Path, what: str) -> list[dict]:
    """Runs two ranks and returns the facts each found; a hang is a failure."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(work), what], env={**os.environ, "RANK": str(rank), "WORLD": "2"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return [json.loads((work / f"facts.{rank}.json").read_text()) for rank in range(2)]


def as_rank_of_invariance(work: Path) -> None:
    """Leaves metrics and gradient of every case in `work`."""
    policy, critic = make_engine(work / "llama"), make_engine(work / "llama", critic=work / "critic")
    facts, gradients = {}, {}
    for name in CASES:
        engine = critic if name.startswith("critic") else policy
        facts[name], gradients[name] = gradient_of(engine, my_share(as_pipeline(make_batch(), CASES[name]())[-1]), name)
    torch.save(gradients, work / f"gradients.{dist.get_rank()}.pt")
    (work / f"facts.{dist.get_rank()}.json").write_text(json.dumps(facts))


def as_rank(work: Path) -> None:
    """Runs every case that needs two ranks, and leaves what they gave in `work`."""
    rank = dist.get_rank()
    facts: dict[str, object] = {}

    def keep(name: str, tensors: dict[str, torch.Tensor]) -> None:
        torch.save({key: value.detach().clone() for key, value in tensors.items()}, work / f"{name}.{rank}.pt")

    for kind in ("llama", "qwen2"):
        engine = make_engine(work / kind)
        batch = make_batch()
        facts[f"{kind}/metrics"] = engine.train(my_share(batch), Grpo())
        keep(f"{kind}.gradients", engine.gradients)
        engine.train(my_share(make_batch(seed=1)), Grpo())
        engine.save(work / f"{kind}.saved")
        keep(f"{kind}.state", engine.optimizer_state() or {})
        keep(f"{kind}.weights", engine.named_weights() or {})

    # A critic, whose head of one row is on rank 0 alone.
    engine = make_engine(work / "llama", critic=work / "critic")
    engine.update(my_share(valued(make_batch())), Values(Ppo()), 1e-2)
    engine.save(work / "critic.saved")
    keep("critic.state", engine.optimizer_state() or {})
    keep("critic.weights", engine.named_weights() or {})

    # One long against four short: the ranks have different numbers of micro-batches.
    engine = make_engine(work / "llama", micro_batch_tokens=4, packing=False)
    batch = make_batch((40, 4, 4, 4, 4))
    mine = my_share(batch, [[0], [1, 2, 3, 4]])
    facts["uneven/logprobs"] = engine.logprobs(mine).tolist()
    facts["uneven/metrics"] = engine.train(mine, Grpo())
    # Everything on rank 0, nothing at all on rank 1.
    engine = make_engine(work / "llama")
    facts["empty/metrics"] = engine.train(my_share(make_batch(), [list(range(10)), []]), Grpo())
    keep("empty.gradients", engine.gradients)
    # Trained tokens on rank 0 alone.
    engine = make_engine(work / "llama")
    batch = make_batch()
    batch.tokens["loss_mask"] &= batch.rows < 5
    weighed(batch, Grpo())
    shards = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    facts["masked/metrics"] = engine.train(my_share(batch, shards), Grpo())
    # A gradient that is not finite on one rank is nobody's step.
    batch = make_batch()
    batch.tokens["advantages"][batch.rows == 1] = math.inf
    before = engine.named_weights()
    before = {name: value.clone() for name, value in before.items()} if before else {}
    facts["infinite/metrics"] = engine.train(my_share(batch), Grpo())
    after = engine.named_weights() or {}
    facts["infinite/unchanged"] = all(torch.equal(before[name], after[name]) for name in before)

    # A checkpoint of one rank on two, and a failing disk, after which the ranks are still together.
    engine = make_engine(work / "llama")
    engine.load(work / "one_rank")
    keep("loaded.state", engine.optimizer_state() or {})
    keep("loaded.weights", engine.named_weights() or {})
    (work / "file").touch()
    try:
        engine.save(work / "file")
        facts["full_disk"] = "saved"
    except OSError as error:
        facts["full_disk"] = type(error).__name__
    facts["after_full_disk"] = engine.train(my_share(make_batch()), Grpo())["tokens"]

    engine = make_engine(work / "llama", dtype="bfloat16")
    facts["bfloat16"] = engine.train(my_share(make_batch()), Grpo())
    facts["bfloat16/dtypes"] = sorted({str(p.dtype) for p in engine.model.parameters()})
    (work / f"facts.{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD"]),
    )
    {"fsdp": as_rank, "invariance": as_rank_of_invariance}[sys.argv[2]](folder)
    dist.destroy_process_group()
