"""What leaves a training engine and comes back: the hub's names, whole tensors, adapters, all bit for bit.

One rank runs in this process; what needs two is one run of two processes (`weights_ranks.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from rollcli.engines import lora, naming
from rollcli.engines.base import GenerateRequest, SamplingParams
from rollcli.engines.storage import checksum
from rollcli.engines.transformers import TransformersEngine
from rollcli.errors import CheckpointError, EngineError

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_rank")
SCRIPT = Path(__file__).with_name("weights_ranks.py")
spec = importlib.util.spec_from_file_location("weights_ranks", SCRIPT)
shared = sys.modules.setdefault("weights_ranks", importlib.util.module_from_spec(spec))
if not hasattr(shared, "make_model"):
    spec.loader.exec_module(shared)
make_model, KINDS, LORA, ranks = shared.make_model, shared.KINDS, shared.LORA, shared.ranks
make_engine, make_batch, Grpo = ranks.make_engine, ranks.make_batch, ranks.Grpo
PROMPT = np.array([5, 9, 3, 40], dtype=np.int32)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for kind in KINDS:
        make_model(kind).save_pretrained(folder / kind)
    for kind, policy in {"mixtral": {}, "llama": {"lora": LORA}}.items():
        trained(folder, kind, **policy).save(folder / f"{kind}.one")
    return folder


def trained(work: Path, kind: str, steps: int = 1, **policy) -> ranks.Watched:
    engine = make_engine(work / kind, **policy)
    for step in range(steps):
        engine.train(make_batch(seed=step), Grpo())
    return engine


def clones(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def sampled(model: transformers.PreTrainedModel) -> tuple[TransformersEngine, np.ndarray, np.ndarray]:
    """The rollout engine on a model, and what it sampled: tokens and log-probabilities."""
    engine = TransformersEngine(model)
    sampling = SamplingParams(max_tokens=12, temperature=ranks.TEMPERATURE)
    engine.add([GenerateRequest(f"{seed}", PROMPT, seed, sampling) for seed in range(4)])
    done = []
    while engine.pending:
        done += engine.step()
    done = sorted(done, key=lambda completion: completion.id)
    return engine, np.stack([each.tokens for each in done]), np.stack([each.logprobs for each in done])


def batch_of(tokens: np.ndarray):
    """Answers to the prompt as a batch that says nothing of its own."""
    rows = [np.concatenate([PROMPT, answer]) for answer in tokens]
    batch = make_batch(tuple(len(row) for row in rows))
    batch.tokens["ids"] = np.concatenate(rows).astype(np.int32)
    place = np.arange(len(batch.rows)) - batch.offsets[batch.rows]
    batch.tokens["loss_mask"] = place >= len(PROMPT)
    return batch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
def test_a_rollout_engine_takes_the_weights_and_computes_the_same(work: Path, kind: str, adapters: bool) -> None:
    trainer = trained(work, kind, **({"lora": LORA} if adapters else {}))
    engine = TransformersEngine(make_model(kind))
    assert {name: tuple(weight.shape) for name, weight in trainer.named_weights().items()} == engine.weight_shapes()
    engine.load_weights(trainer.named_weights(), version=1)
    assert engine.checksums() == {name: checksum(weight) for name, weight in trainer.named_weights().items()}
    _, tokens, logprobs = sampled(engine.model)
    batch = batch_of(tokens)
    theirs = trainer.logprobs(batch)[batch.tokens["loss_mask"]].reshape(logprobs.shape)
    assert np.abs(theirs - logprobs).max() < 1e-4
    before = trainer.logprobs(batch) if not adapters else None
    if adapters:
        with trainer.without_adapter():
            before = trainer.logprobs(batch)
        assert np.abs(before[batch.tokens["loss_mask"]].reshape(logprobs.shape) - logprobs).max() > 1e-3


@pytest.mark.parametrize("kind", shared.MIXTURES)
def test_a_mixture_samples_what_its_model_says(kind: str) -> None:
    model = make_model(kind)
    _, tokens, logprobs = sampled(model)
    plain = make_model(kind)
    for answer, found in zip(tokens, logprobs):
        ids = torch.tensor(np.concatenate([PROMPT, answer]).astype(np.int64))
        expected = torch.log_softmax(plain(ids[None]).logits[0] / ranks.TEMPERATURE, -1)
        picked = expected[torch.arange(len(PROMPT) - 1, len(ids) - 1), ids[len(PROMPT) :]]
        assert np.abs(picked.detach().numpy() - found).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_a_model_of_the_hub(work: Path, kind: str, tmp_path: Path) -> None:
    engine = trained(work, kind)
    engine.save(tmp_path)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert written.keys() == load_file(work / kind / "model.safetensors").keys() == engine.named_weights().keys()
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    assert settings["architectures"] == [type(make_model(kind)).__name__] and settings["dtype"] == "float32"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert same(naming.to_hub(model, naming.tensors_of(model)), engine.named_weights())
    state = load_file(tmp_path / "optimizer.safetensors")
    assert state.keys() == {f"{name}.{key}" for name in written for key in ("step", "exp_avg", "exp_avg_sq")}
    assert all(state[f"{name}.exp_avg"].shape == weight.shape for name, weight in written.items())


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_moments_convert_as_their_weights_do(work: Path, kind: str) -> None:
    """Two plain steps of AdamW on the expert's own gradient, by hand, give the moments of the expert."""
    engine = make_engine(work / kind)
    gradients = []
    for step in range(2):
        engine.train(make_batch(seed=step), Grpo())
        fused = engine.gradients["model.layers.1.mlp.experts.gate_up_proj"]
        gradients.append(fused[2, fused.shape[1] // 2 :])
    first, second = engine.config.optimizer.betas
    mean, square = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    for gradient in gradients:
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
    name = f"model.layers.1.{'block_sparse_moe.experts.2.w3' if kind == 'mixtral' else 'mlp.experts.2.up_proj'}.weight"
    state = engine.optimizer_state()
    torch.testing.assert_close(state[f"{name}.exp_avg"], mean)
    torch.testing.assert_close(state[f"{name}.exp_avg_sq"], square)
    assert float(state[f"{name}.step"]) == 2


@pytest.mark.parametrize(
    ("kind", "policy"), [("mixtral", {}), ("llama", {"lora": LORA}), ("qwen3_moe", {"lora": LORA})]
)
def test_a_restored_engine_goes_on_bit_for_bit(work: Path, kind: str, policy: dict, tmp_path: Path) -> None:
    engine = trained(work, kind, **policy)
    other = trained(work, kind, steps=2, **policy)  # a state that must give way
    engine.save(tmp_path)
    other.load(tmp_path)
    assert same(engine.optimizer_state(), other.optimizer_state())
    metrics = [each.train(make_batch(seed=5), Grpo()) for each in (engine, other)]
    assert metrics[0] == metrics[1] and same(clones(engine.named_weights()), clones(other.named_weights()))


# --- adapters


def test_a_step_trains_adapters_alone_and_the_export_is_base_plus_adapter(work: Path, tmp_path: Path) -> None:
    engine = make_engine(work / "llama", lora=LORA)
    batch = make_batch()
    with engine.without_adapter():  # before any update: FSDP must not take adapters for frozen
        reference = engine.logprobs(batch)
    assert (engine.logprobs(batch) == reference).all()
    batch.tokens["reference_logprobs"] = batch.tokens["old_logprobs"] = reference
    metrics = engine.train(batch, Grpo())
    assert metrics["kl_penalty"] == 0 and metrics["kl_old"] == 0  # the first ratio is 1
    assert len(engine.optimizer.state) == 2 * len(engine.adapted) == 28
    assert not (engine.logprobs(batch) == reference).all()
    with engine.without_adapter():
        assert (engine.logprobs(batch) == reference).all()
    engine.save(tmp_path)
    state = load_file(tmp_path / "optimizer.safetensors")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.rpartition(".")[0] for name in state} == set(adapter)
    base, merged = (load_file(folder / "model.safetensors") for folder in (work / "llama", tmp_path / "model"))
    assert base.keys() == merged.keys()
    changed = set()
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            changed.add(name)
            product = adapter[f"{stem}.lora_B.weight"].double() @ adapter[f"{stem}.lora_A.weight"].double()
            expected = weight.double() + LORA.alpha / LORA.rank * product
            assert float((expected - merged[name]).abs().max()) < 1e-5 and not torch.equal(weight, merged[name])
        else:
            assert torch.equal(weight, merged[name])
    assert len(changed) == len(engine.adapted)


def test_gradients_of_adapters_are_pefts(work: Path) -> None:
    """Against a PeftModel with the same adapters, and the objective written token by token."""
    import peft

    engine = make_engine(work / "llama", lora=LORA)
    engine.train(make_batch(seed=3), Grpo())  # or A would have no gradient, since B is 0
    engine_adapters = clones(engine.trained_weights())
    engine.train(make_batch(), Grpo())
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(make_model("llama"), config)
    peft.set_peft_model_state_dict(theirs, engine_adapters)
    ranks.reference_grpo(theirs, make_batch()).backward()
    found = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    ours = {
        lora.PREFIX + name.replace(".default", ""): gradient
        for name, gradient in engine.gradients.items()
        if gradient is not None
    }
    assert found.keys() == ours.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5)


def test_adapters_travel_alone(work: Path) -> None:
    engine = trained(work, "mixtral", lora=LORA)
    everything = list(engine.weight_buckets(5000))
    base, last = {name: weight for part in everything[:-1] for name, weight in part.items()}, everything[-1]
    sizes = [sum(weight.nbytes for weight in part.values()) for part in everything[:-1]]
    alone = {group.hub for group in naming.groups(make_model("mixtral"))}
    assert len(sizes) > 5
    assert all(size <= 5000 or tuple(part) in alone for size, part in zip(sizes, everything))
    (alone,) = engine.weight_buckets(5000, adapters_only=True)
    assert alone.keys() == last.keys() == engine.adapter_weights().keys() and len(alone) == 8
    merged = {name: lora.merge(weight, last[name]) if name in last else weight for name, weight in base.items()}
    assert same(merged, engine.named_weights())
    whole = trained(work, "mixtral")
    parts = list(whole.weight_buckets(10**9, adapters_only=True))
    assert len(parts) == 1 and same(parts[0], whole.named_weights())


def test_adapters_of_another_base_or_of_none_are_refused(work: Path, tmp_path: Path) -> None:
    engine = trained(work, "llama", lora=LORA)
    engine.save(tmp_path / "lora")
    other = make_model("llama", initializer_range=0.1)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="is not that of the model which the run starts from"):
        make_engine(tmp_path / "other", lora=LORA).load(tmp_path / "lora")
    with pytest.raises(CheckpointError, match="has no adapters"):
        engine.save(tmp_path / "plain")
        (tmp_path / "plain" / "adapter" / lora.WEIGHTS).unlink()
        make_engine(work / "llama", lora=LORA).load(tmp_path / "plain")


def test_only_a_policy_with_adapters_is_its_own_reference(work: Path) -> None:
    with pytest.raises(EngineError, match="no adapters"):
        make_engine(work / "llama").without_adapter()


# --- two ranks


@pytest.fixture(scope="module")
def two_ranks(work: Path) -> Path:
    """What two ranks left; a hang is a failure."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(work)], env={**os.environ, "RANK": str(rank), "WORLD": "2"},
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
    return work


@pytest.mark.parametrize(("kind", "policy"), [("mixtral", {}), ("llama", {"lora": LORA})])
def test_checkpoints_of_one_rank_and_of_two_are_each_others(two_ranks: Path, kind: str, policy: dict) -> None:
    one = make_engine(two_ranks / kind, **policy)
    one.load(two_ranks / f"{kind}.one")
    found = torch.load(two_ranks / f"{kind}.found")
    assert same(found["held"], {**one.named_weights(), **one.optimizer_state()})
    expected = list(one.weight_buckets(5000))
    assert [list(bucket) for bucket in found["buckets"]] == [list(bucket) for bucket in expected]
    two = make_engine(two_ranks / kind, **policy)
    two.load(two_ranks / f"{kind}.two")
    weights = one.named_weights()
    for name, weight in two.named_weights().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-4)
