"""One suite over every training engine that is installed: what one computes, all do.

The oracle is transformers and torch alone, token by token. One rank runs in this process; what needs two is one run of
two processes (`train_ranks.py`).
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rollcli import registry
from rollcli.algorithms.ppo import Ppo
from rollcli.config.schema import ModelConfig
from rollcli.engines.models import load_critic
from rollcli.engines.objectives import Distribution, Values
from rollcli.errors import CheckpointError

SCRIPT = Path(__file__).with_name("train_ranks.py")
spec = importlib.util.spec_from_file_location("train_ranks", SCRIPT)
ranks = sys.modules.get("train_ranks") or importlib.util.module_from_spec(spec)
if "train_ranks" not in sys.modules:
    sys.modules["train_ranks"] = ranks
    spec.loader.exec_module(ranks)
shared, copied, logprobs, train = ranks.shared, ranks.copied, ranks.logprobs, ranks.train
make_batch, same, valued = shared.make_batch, shared.same, shared.valued

NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(not ranks.installed(name), reason=f"no {case.package} installed"))
    for name, case in ranks.CASES.items()
]
KINDS = ["llama", "qwen2"]


@pytest.fixture(scope="module", autouse=True)
def world(one_rank):
    yield
    if "deepspeed" in sys.modules:
        from deepspeed.utils import groups

        groups._release_process_group_references()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contract")
    shared.write_model(folder / "llama", attention_dropout=0.5)
    shared.write_model(folder / "qwen2", "qwen2")
    shared.write_critic(folder / "critic", folder / "llama")
    ranks.write_mixture(folder / "moe")
    return folder


@pytest.fixture(scope="module")
def references(work: Path) -> dict[str, Any]:
    return {kind: ranks.reference(work / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def stories(work: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What each engine did on one rank; filled by `story`."""
    return {}


@pytest.fixture
def story(work: Path, stories, name: str, kind: str) -> dict[str, Any]:
    """A forward pass, two steps and a checkpoint after the first, of one engine on one kind of model."""
    if (name, kind) not in stories:
        engine, found = ranks.make(work / kind, ranks.CASES[name]), {}
        found["start"] = copied(engine.named_weights())
        found["logprobs"] = logprobs(engine, make_batch())
        found["first"] = train(engine, make_batch())
        found["state"], found["weights"] = copied(engine.optimizer_state()), copied(engine.named_weights())
        found["folder"] = work / (f"{name}.one_rank" if kind == "qwen2" else f"{name}.{kind}")
        engine.save(found["folder"])
        found["second"] = train(engine, make_batch(seed=1))
        found["last"], found["last state"] = copied(engine.named_weights()), copied(engine.optimizer_state())
        found["engine"] = engine
        stories[name, kind] = found
    return stories[name, kind]


@pytest.fixture(scope="module")
def two_ranks(work: Path, stories) -> list[dict]:
    """What two ranks found; a hang is a failure."""
    names = [name for name in ranks.CASES if ranks.installed(name)]
    for name in names:
        engine = ranks.make(work / "qwen2", ranks.CASES[name])
        train(engine, make_batch())
        engine.save(work / f"{name}.one_rank")
    return ranks.run_two(work, names)


def kept(work: Path, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(work / f"{name}.{rank}.pt")


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], rtol=10 * tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- one rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
class TestOneRank:
    """Each engine on a model with an output head of its own, and on one with biases and tied embeddings."""

    def test_forward_is_transformers(self, story, references, kind: str) -> None:
        assert story["logprobs"].dtype == np.float32
        assert np.abs(story["logprobs"] - references[kind].logprobs[0]).max() < 1e-5

    def test_weights_have_the_hubs_names_and_shapes(self, story, work, kind: str) -> None:
        assert same(story["start"], load_file(work / kind / "model.safetensors"))
        assert {tensor.dtype for tensor in story["last"].values()} == {torch.float32}

    def test_an_update_returns_the_log_probabilities_before_it(self, story) -> None:
        column = story["first"][1]
        assert column.dtype == np.float32 and np.abs(column - story["logprobs"]).max() < 1e-6

    def test_metrics(self, story, references, kind: str) -> None:
        metrics = story["first"][0]
        assert metrics["loss"] == pytest.approx(references[kind].losses[0], abs=1e-5)
        norm = sum(float(gradient.square().sum()) for gradient in references[kind].gradients.values()) ** 0.5
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics["tokens"] == make_batch().tokens["loss_mask"].sum()
        assert metrics["learning_rate"] == ranks.RATE and metrics["skipped_updates"] == 0
        assert 0 < metrics["clip_share"] < 1 and 0 < metrics["entropy"] < np.log(61) and metrics["kl_old"] > 0

    def test_gradients_are_the_references(self, story, references, kind: str) -> None:
        close(ranks.gradients(story["state"]), references[kind].gradients)

    def test_two_steps_are_adamws(self, story, references, kind: str) -> None:
        """Vectors are not decayed, moments are kept, and the second step's loss is that of the first's weights."""
        close(story["weights"], references[kind].weights[0], 1e-5)
        assert story["second"][0]["loss"] == pytest.approx(references[kind].losses[1], abs=1e-5)
        close(story["last"], references[kind].weights[1], 1e-5)
        steps = {float(value) for name, value in story["last state"].items() if name.endswith(".step")}
        assert steps == {2}

    def test_optimizer_state_has_the_weights_names(self, story) -> None:
        kinds = ("step", "exp_avg", "exp_avg_sq")
        assert set(story["state"]) == {f"{name}.{each}" for name in story["weights"] for each in kinds}
        for name, weight in story["weights"].items():
            assert story["state"][f"{name}.exp_avg"].shape == weight.shape

    def test_transformers_loads_what_is_saved(self, story) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(story["folder"] / "model", dtype=torch.float32)
        assert same(dict(model.named_parameters()), story["weights"])

    def test_a_restored_engine_goes_on_bit_for_bit(self, story, work, name: str, kind: str) -> None:
        other = ranks.make(work / kind, ranks.CASES[name])
        train(other, make_batch(seed=7))  # a state that must give way
        other.load(story["folder"])
        assert same(copied(other.named_weights()), story["weights"])
        assert same(copied(other.optimizer_state()), story["state"])
        metrics, column = train(other, make_batch(seed=1))
        assert metrics == story["second"][0] and np.array_equal(column, story["second"][1])
        assert same(copied(other.named_weights()), story["last"])


@pytest.mark.parametrize("kind", ["llama"])
@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_trained_on_is_skipped(story, name: str, kind: str) -> None:
    """No token, or a gradient that is not finite, leaves weights, moments and the step's number as they are."""
    engine, untouched = story["engine"], story["last"]
    silent = make_batch()
    silent.tokens["loss_mask"][:] = False
    spoiled = make_batch()
    spoiled.tokens["advantages"][20:] = np.nan
    for batch in (silent, spoiled):
        metrics, _ = train(engine, batch)
        assert metrics["skipped_updates"] == 1
        assert same(copied(engine.named_weights()), untouched)
        assert same(copied(engine.optimizer_state()), story["last state"])
    assert train(engine, make_batch(seed=3))[0]["skipped_updates"] == 0
    after = copied(engine.named_weights())
    engine.load(story["folder"])
    for seed in (1, 3):
        train(engine, make_batch(seed=seed))
    assert same(copied(engine.named_weights()), after)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_made_as_the_protocol_says(name: str) -> None:
    taken = inspect.signature(registry.resolve("train_engines", ranks.CASES[name].engine)).parameters
    asked = {"frozen": False, "dtype": "auto", "seed": 0}
    assert list(taken)[:2] == ["model", "config"] and {key: taken[key].default for key in asked} == asked


@pytest.mark.parametrize("name", NAMES)
def test_no_sample_at_all_is_no_step(work, name: str) -> None:
    engine = ranks.make(work / "llama", ranks.CASES[name])
    before, nothing = copied(engine.named_weights()), make_batch().select(np.zeros(0, np.int64))
    assert logprobs(engine, nothing).shape == (0,)
    metrics, column = train(engine, nothing)
    assert (metrics["tokens"], metrics["skipped_updates"], column.shape) == (0, 1, (0,))
    assert same(copied(engine.named_weights()), before)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_longer_than_a_micro_batch_are_whole(work, references, name: str) -> None:
    engine = ranks.make(work / "llama", ranks.CASES[name], micro_batch_tokens=1)
    assert np.abs(logprobs(engine, make_batch()) - references["llama"].logprobs[0]).max() < 1e-5
    train(engine, make_batch())
    close(ranks.gradients(engine.optimizer_state()), references["llama"].gradients)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_that_is_damaged_or_anothers_is_refused_by_name(work, tmp_path: Path, name: str) -> None:
    engine, norm = ranks.make(work / "llama", ranks.CASES[name]), "model.norm.weight"
    train(engine, make_batch())
    engine.save(tmp_path / "whole")
    model, optimizer = Path("model") / "model.safetensors", Path("optimizer.safetensors")

    def damaged(file: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None) -> Path:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        tensors = load_file(folder / file)
        (folder / file).unlink()
        if change is not None:
            change(tensors)
            save_file(tensors, folder / file)
        return folder

    def shorter(key: str) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda tensors: tensors.update({key: tensors[key][:5].clone()})

    torn = damaged(model, shorter(norm))
    (torn / model).write_bytes((torn / model).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        engine.load(torn)
    for file, change, said in (
        (model, None, "has no tensor"),
        (optimizer, None, "cannot be read"),
        (model, lambda tensors: tensors.pop(norm), f"has no tensor `{norm}`"),
        (model, shorter(norm), f"`{norm}` of .* is of shape"),
        (optimizer, lambda tensors: tensors.pop(f"{norm}.exp_avg"), f"has no tensor `{norm}.exp_avg`"),
        (optimizer, shorter(f"{norm}.exp_avg_sq"), f"`{norm}.exp_avg_sq` of .* is of shape"),
    ):
        with pytest.raises(CheckpointError, match=said):
            engine.load(damaged(file, change))
    with pytest.raises(CheckpointError, match="cannot be read"):
        engine.load(tmp_path / "nowhere")
    engine.load(tmp_path / "whole")


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_goes_on_from_anothers_checkpoint(work, references, name: str) -> None:
    """From fsdp's to this one, and from this one's to fsdp's."""
    fsdp, case = ranks.CASES["fsdp"], ranks.CASES[name]
    for wrote, reads in ((fsdp, case), (case, fsdp)):
        engine, other = ranks.make(work / "qwen2", wrote), ranks.make(work / "qwen2", reads)
        train(engine, make_batch())
        engine.save(work / f"exchange.{name}")
        other.load(work / f"exchange.{name}")
        assert same(copied(engine.named_weights()), copied(other.named_weights()))
        assert same(copied(engine.optimizer_state()), copied(other.optimizer_state()))
        train(other, make_batch(seed=1))
        close(copied(other.named_weights()), references["qwen2"].weights[1], 1e-5)


@pytest.mark.parametrize("name", [each for each in NAMES if each.values[0] != "fsdp"])
def test_a_mixture_of_experts_is_what_fsdp_makes_of_it(work, name: str) -> None:
    """Experts are one tensor in memory and many on the hub; weights, moments and checkpoints are the hub's."""
    engine, fsdp = (ranks.make(work / "moe", ranks.CASES[each]) for each in (name, "fsdp"))
    assert same(copied(engine.named_weights()), load_file(work / "moe" / "model.safetensors"))
    for each in (engine, fsdp):
        train(each, make_batch())
    close(copied(engine.named_weights()), copied(fsdp.named_weights()), 1e-5)
    close(ranks.gradients(engine.optimizer_state()), ranks.gradients(fsdp.optimizer_state()), 1e-5)
    engine.save(work / f"moe.{name}")
    fsdp.load(work / f"moe.{name}")
    assert same(copied(engine.optimizer_state()), copied(fsdp.optimizer_state()))
    for each in (engine, fsdp):
        train(each, make_batch(seed=1))
    close(copied(engine.named_weights()), copied(fsdp.named_weights()), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_before_the_first_step_restores(work, tmp_path: Path, name: str) -> None:
    engine, other = (ranks.make(work / "llama", ranks.CASES[name]) for _ in range(2))
    engine.save(tmp_path)
    train(other, make_batch())
    other.load(tmp_path)
    assert other.optimizer_state() == {} and same(copied(engine.named_weights()), copied(other.named_weights()))
    for each in (engine, other):
        train(each, make_batch(seed=1))
    assert same(copied(engine.named_weights()), copied(other.named_weights()))


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_engine_only_looks(work, tmp_path: Path, references, name: str) -> None:
    engine, batch = ranks.make(work / "llama", ranks.CASES[name], frozen=True), make_batch()
    assert np.abs(logprobs(engine, batch) - references["llama"].logprobs[0]).max() < 1e-5
    distribution = engine.forward(batch, Distribution(shared.TEMPERATURE))
    mask, ids = batch.tokens["loss_mask"], batch.tokens["ids"]
    assert distribution.shape == (len(ids), shared.VOCABULARY)
    assert np.abs(distribution[mask, ids[mask]] - references["llama"].logprobs[0][mask]).max() < 1e-5
    engine.save(tmp_path)
    assert not (tmp_path / "optimizer.safetensors").exists()
    assert same(load_file(tmp_path / "model" / "model.safetensors"), load_file(work / "llama" / "model.safetensors"))
    with pytest.raises(AssertionError, match="frozen"):
        train(engine, batch)


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_engine_takes_other_weights(work, name: str) -> None:
    engine, trained = (ranks.make(work / "llama", ranks.CASES[each], frozen=each == name) for each in (name, "fsdp"))
    if name == "fsdp":
        trained = ranks.make(work / "llama", ranks.CASES["fsdp"])
    train(trained, make_batch())
    trained.save(work / f"for_frozen.{name}")
    engine.load(work / f"for_frozen.{name}")
    batch = make_batch()
    assert np.abs(logprobs(engine, batch) - logprobs(trained, batch)).max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_critic_learns_as_the_reference_does(work, tmp_path: Path, name: str) -> None:
    engine, batch = ranks.make(work / "llama", ranks.CASES[name], critic=work / "critic"), valued(make_batch())
    model = load_critic(ModelConfig("absent"), str(work / "critic"), torch.device("cpu"), 0)
    with torch.no_grad():
        rows = [torch.cat([torch.zeros(1), row]) for row in shared.reference_values(model, batch)]
    values = engine.forward(batch, Values())
    assert np.abs(values - torch.cat(rows).numpy() * batch.tokens["loss_mask"]).max() < 1e-5
    metrics, column = engine.update(batch, Values(Ppo()), ranks.RATE)
    loss = shared.reference_value_loss(model, batch)
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5) and np.abs(column - values).max() < 1e-6
    close(ranks.gradients(engine.optimizer_state()), {n: p.grad for n, p in model.named_parameters()}, 1e-5)
    engine.save(tmp_path)
    saved = load_critic(ModelConfig("absent"), str(tmp_path / "model"), torch.device("cpu"), 0)
    assert same(copied(engine.named_weights()), dict(saved.named_parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_many_steps_and_syncs_leave_memory_as_it_is(work, name: str) -> None:
    engine, batch = ranks.make(work / "llama", ranks.CASES[name]), make_batch()

    def resident_mib(steps: int) -> float:
        for _ in range(steps):
            train(engine, batch), logprobs(engine, batch), list(engine.weight_buckets(5000))
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    before = resident_mib(20)
    assert resident_mib(50) - before < 2  # 50 copies of the model would be 2.5, of its gradients and moments 7


@pytest.mark.parametrize("name", NAMES)
def test_without_a_device_of_its_own_an_engine_stays_where_it_is(work, references, name: str) -> None:
    engine = ranks.make(work / "llama", ranks.CASES[name])
    engine.offload()
    engine.onload()
    assert np.abs(logprobs(engine, make_batch()) - references["llama"].logprobs[0]).max() < 1e-5


# --- two ranks


def gathered(facts: list[dict], name: str, indices: list[list[int]]) -> np.ndarray:
    """A column that two ranks made parts of, in the batch's order."""
    batch = make_batch()
    column = np.zeros(len(batch.tokens["ids"]), np.float32)
    for found, part in zip(facts, indices):
        places = [np.arange(batch.offsets[row], batch.offsets[row + 1]) for row in part]
        column[np.concatenate(places)] = found[name]
    return column


@pytest.mark.parametrize("name", NAMES)
class TestTwoRanks:
    """Ranks with different numbers of micro-batches, and one without any, get what one rank gets."""

    def test_forward_and_column(self, two_ranks, references, name: str) -> None:
        for kind in ("logprobs", "column"):
            column = gathered(two_ranks, f"{name}/{kind}", ranks.UNEVEN)
            assert np.abs(column - references["qwen2"].logprobs[0]).max() < 1e-5

    def test_gradients_and_weights(self, two_ranks, work, references, name: str) -> None:
        close(ranks.gradients(kept(work, f"{name}.state")), references["qwen2"].gradients)
        close(kept(work, f"{name}.first"), references["qwen2"].weights[0], 1e-5)
        close(kept(work, f"{name}.second"), references["qwen2"].weights[1], 1e-5)
        assert kept(work, f"{name}.state", 1) == kept(work, f"{name}.first", 1) == {}

    def test_metrics_are_those_of_one_rank(self, two_ranks, references, name: str) -> None:
        for step, found in enumerate(("first", "second")):
            assert two_ranks[0][f"{name}/{found}"] == two_ranks[1][f"{name}/{found}"]
            metrics = two_ranks[0][f"{name}/{found}"]
            assert metrics["loss"] == pytest.approx(references["qwen2"].losses[step], abs=1e-5)
            assert metrics["tokens"] == make_batch(seed=step).tokens["loss_mask"].sum()

    def test_a_gradient_not_finite_on_one_rank_is_skipped_on_both(self, two_ranks, work, name: str) -> None:
        assert [facts[f"{name}/spoiled"]["skipped_updates"] for facts in two_ranks] == [1, 1]
        assert same(kept(work, f"{name}.spoiled"), kept(work, f"{name}.second"))

    @pytest.mark.parametrize("reader", ["itself", "fsdp"])
    def test_a_checkpoint_of_two_ranks_loads_on_one(self, two_ranks, work, name: str, reader: str) -> None:
        engine = ranks.make(work / "qwen2", ranks.CASES[name if reader == "itself" else "fsdp"])
        engine.load(work / f"{name}.two_ranks")
        assert same(copied(engine.named_weights()), kept(work, f"{name}.second"))
        steps = {float(value) for key, value in engine.optimizer_state().items() if key.endswith(".step")}
        assert steps == {2}

    @pytest.mark.parametrize("writer", ["one_rank", "fsdp.one_rank"])
    def test_a_checkpoint_of_one_rank_goes_on_on_two(self, two_ranks, work, references, name: str, writer: str) -> None:
        close(kept(work, f"{name}.from.{writer}"), references["qwen2"].weights[1], 1e-5)

    def test_a_frozen_engine(self, two_ranks, work, references, name: str) -> None:
        shards = [list(part) for part in make_batch().shards(2)]
        column = gathered(two_ranks, f"{name}/frozen", shards)
        assert np.abs(column - references["qwen2"].logprobs[0]).max() < 1e-5
        assert same(kept(work, f"{name}.frozen"), load_file(work / "qwen2" / "model.safetensors"))
