"""Adapters: where they go, what they start as, and what is told where they cannot go."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rollcli.config.schema import LoraConfig
from rollcli.engines import lora, naming
from rollcli.errors import CheckpointError, EngineError

peft = pytest.importorskip("peft")
spec = importlib.util.spec_from_file_location("weights_ranks", Path(__file__).with_name("weights_ranks.py"))
shared = sys.modules.setdefault("weights_ranks", importlib.util.module_from_spec(spec))
if not hasattr(shared, "make_model"):
    spec.loader.exec_module(shared)
make_model, KINDS, LORA = shared.make_model, shared.KINDS, shared.LORA

IDS = torch.tensor([[5, 9, 3, 40, 17, 8]])
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
DENSE = {"gate_proj", "up_proj", "down_proj"}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip


def disturb(model: transformers.PreTrainedModel) -> None:
    """Gives every adapter something to add."""
    with torch.no_grad():
        for layer in lora.layers(model):
            torch.nn.init.normal_(model.get_parameter(layer.b), std=0.3)


def test_merge_adds_the_product_in_float32() -> None:
    a, b = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0], [100.0]])
    merged = lora.merge(torch.ones(2, 3), lora.LowRank(a, b, 0.5))
    assert merged.tolist() == [[6.0, 11.0, 16.0], [51.0, 101.0, 151.0]]
    half = lora.merge(torch.ones(2, 3, dtype=torch.bfloat16), lora.LowRank(a / 1024, b / 10, 1.0))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, (1 + (b / 10) @ (a / 1024)).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(kind: str) -> None:
    model = make_model(kind)
    before = model(IDS).logits
    base = {name: tensor.clone() for name, tensor in naming.tensors_of(model).items()}
    wrapped = lora.wrap(model, LORA, seed=1)
    assert wrapped is model and torch.equal(model(IDS).logits, before)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == [name for name, _ in model.named_parameters() if "lora_" in name] and trained
    assert set(lora.base_tensors(model)) == set(base) == {n for g in naming.groups(model) for n in g.memory}
    assert all(torch.equal(tensor, base[name]) for name, tensor in lora.base_tensors(model).items())
    kinds = {layer.weight.split(".")[-2] for layer in lora.layers(model)}
    shared_expert = DENSE | {"shared_expert_gate"}
    extra = {"llama": DENSE, "qwen2": DENSE, "qwen2_moe": shared_expert}
    assert kinds == ATTENTION | extra.get(kind, set())
    assert all(layer.scale == 2.0 for layer in lora.layers(model))


def test_the_start_follows_the_seed_and_nothing_else() -> None:
    starts = []
    for seed, other in ((1, 0), (1, 5), (2, 0)):
        torch.manual_seed(other)
        torch.rand(other + 1)
        model = lora.wrap(make_model("llama"), LORA, seed)
        starts.append(torch.cat([model.get_parameter(layer.a).flatten() for layer in lora.layers(model)]))
        assert not any(model.get_parameter(layer.b).any() for layer in lora.layers(model))
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])
    bound = 1 / 32**0.5  # Kaiming's uniform start at a = √5 is within 1/√in
    assert 0.9 * bound < float(starts[0][: 4 * 32].abs().max()) <= bound


@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("mixtral", {}), ("gpt2", GPT2)])
def test_switched_off_the_model_is_its_base_and_merged_it_is_the_sum(kind: str, options: dict) -> None:
    model, base = make_model(kind, **options), make_model(kind, **options)
    lora.wrap(model, LORA, seed=1)
    disturb(model)
    changed = model(IDS).logits
    with lora.without_adapters(model):
        assert torch.equal(model(IDS).logits, base(IDS).logits)
        # Or FSDP would take them for frozen for good.
        assert all(model.get_parameter(layer.a).requires_grad for layer in lora.layers(model))
    assert torch.equal(model(IDS).logits, changed) and not torch.allclose(changed, base(IDS).logits, atol=0.1)
    weights = dict(base.named_parameters())
    with torch.no_grad():
        for layer in lora.layers(model):
            change = layer.low_rank(model.get_parameter(layer.a), model.get_parameter(layer.b))
            weights[layer.weight].copy_(lora.merge(weights[layer.weight], change))
    torch.testing.assert_close(base(IDS).logits, changed, atol=1e-4, rtol=1e-4)


def test_named_targets(tmp_path: Path) -> None:
    model = lora.wrap(make_model("llama"), LoraConfig(rank=2, targets=["q_proj", "1.mlp.down_proj"]), seed=0)
    assert [layer.weight for layer in lora.layers(model)] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ]
    head = lora.wrap(make_model("llama"), LoraConfig(rank=2, targets=["all-linear", "lm_head"]), seed=0)
    assert [layer.weight for layer in lora.layers(head)][-1] == "lm_head.weight"


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        ("llama", "q_porj", r"no linear layer `q_porj`"),
        ("llama", "norm", r"no linear layer `norm`"),
        ("mixtral", "gate_up_proj", r"a `mixtral` model has no linear layer `gate_up_proj`"),
        ("qwen3_moe", "up_proj", r"peft takes `up_proj` of a `qwen3_moe` model for its experts"),
        ("qwen2", "lm_head", r"`lm_head` of this model is its embedding"),
    ],
)
def test_targets_that_cannot_have_one(kind: str, target: str, message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        # The first layer of the mixture that has the choice is dense.
        options = {"mlp_only_layers": [0]} if kind == "qwen3_moe" else {}
        lora.wrap(make_model(kind, **options), LoraConfig(rank=2, targets=[target]), seed=0)
    assert caught.value.hint and ("did you mean `q_proj`" in caught.value.hint) == (target == "q_porj")


def test_all_linear_layers_are_those_that_can_have_one() -> None:
    model = lora.wrap(make_model("qwen3_moe", mlp_only_layers=[0]), LORA, seed=0)
    assert {layer.weight.split(".")[-2] for layer in lora.layers(model)} == ATTENTION


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(EngineError, match="needs the package peft") as caught:
        lora.wrap(make_model("llama"), LORA, seed=0)
    assert caught.value.hint == "pip install 'rollcli[lora]'"


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_pefts(kind: str, tmp_path: Path) -> None:
    make_model(kind).save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora.wrap(model, LORA, seed=1)
    disturb(model)
    lora.save(model, lora.trained_tensors(model), tmp_path / "adapter")
    again = lora.load(tmp_path / "adapter")
    assert all(torch.equal(again[name], tensor) for name, tensor in lora.trained_tensors(model).items())
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["task_type"]) == (4, 8.0, "CAUSAL_LM")
    assert settings["base_model_name_or_path"] == str(tmp_path / "base") and settings["inference_mode"]
    assert settings["target_modules"] == sorted(settings["target_modules"])
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(theirs(IDS).logits, model(IDS).logits)
    assert not model.peft_config[lora.NAME].inference_mode


def test_a_critics_head_is_trained_whole(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "base")
    load = transformers.AutoModelForTokenClassification.from_pretrained
    critic = lora.wrap(load(tmp_path / "base", num_labels=1).eval(), LORA, seed=1)
    disturb(critic)
    assert {"score.weight", "score.bias"} == {
        name for name, parameter in critic.named_parameters() if parameter.requires_grad and "lora_" not in name
    }
    lora.save(critic, lora.trained_tensors(critic), tmp_path / "adapter")
    assert "base_model.model.score.weight" in load_file(tmp_path / "adapter" / lora.WEIGHTS)
    theirs = peft.PeftModel.from_pretrained(load(tmp_path / "base", num_labels=1), tmp_path / "adapter").eval()
    torch.testing.assert_close(theirs(IDS).logits, critic(IDS).logits)


def test_a_checkpoint_without_adapters(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no adapters"):
        lora.load(tmp_path / "adapter")
