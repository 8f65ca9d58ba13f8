"""Tensors and models on disk: equal bits, hub layout, no pickles."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from rollcli.engines import naming
from rollcli.engines.storage import checksum, load_tensors, save_model, save_tensors


@pytest.fixture
def model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=37, **sizes))


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "step": torch.tensor(3.0), "count": torch.tensor(7), "view": torch.arange(12.0).reshape(3, 4).T,
        "half": torch.tensor([1 / 3], dtype=torch.bfloat16), "odd": torch.tensor([float("nan"), -0.0, 1e-45]),
        "learned": torch.ones(2, requires_grad=True), "none": torch.zeros(0, 4),
    }  # fmt: skip
    save_tensors(tensors, tmp_path / "deep" / "file.safetensors")
    back = load_tensors(tmp_path / "deep" / "file.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert (
            back[name].numpy(force=True).tobytes() == tensor.detach().contiguous().numpy(force=True).tobytes()
            if (tensor.dtype != torch.bfloat16)
            else torch.equal(back[name], tensor)
        )


def test_a_folder_of_files_is_one_set(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_tensors({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    assert load_tensors(tmp_path).keys() == {"a", "b"}


def test_a_model_is_in_the_hubs_layout(model, tmp_path: Path) -> None:
    save_model(model, dict(model.named_parameters()), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert back.dtype == torch.float32 and back.config.vocab_size == 37
    settings = json.loads((tmp_path / "config.json").read_text())
    assert (settings["architectures"], settings["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert model.config.architectures is None
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, back.get_parameter(name))


def test_weights_that_are_views_of_something_longer_are_written(model, tmp_path: Path) -> None:
    """A tensor gathered from ranks that do not divide it stands in a longer buffer."""
    weights = {}
    for name, parameter in model.named_parameters():
        longer = torch.zeros(len(parameter) + 1, *parameter.shape[1:])
        longer[:-1] = parameter.detach()
        weights[name] = longer[:-1]
    save_model(model, weights, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written[name], weight) for name, weight in weights.items())


def test_generation_settings_are_kept_even_if_they_contradict_themselves(model, tmp_path: Path) -> None:
    """Public models come with a temperature and no sampling; a checkpoint must not fail on that."""
    model.generation_config = transformers.GenerationConfig(
        temperature=0.6, top_p=0.9, do_sample=False, eos_token_id=[2, 7]
    )
    save_model(model, dict(model.named_parameters()), tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert settings["temperature"] == 0.6 and settings["eos_token_id"] == [2, 7]
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == [2, 7]


def test_a_model_without_generation_settings(model, tmp_path: Path) -> None:
    model.generation_config = None
    save_model(model, dict(model.named_parameters()), tmp_path)
    assert not (tmp_path / "generation_config.json").exists()


def test_a_mixture_is_written_as_the_hub_holds_it(tmp_path: Path) -> None:
    """Experts are views of one tensor in memory, and files of their own on the disk."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixture = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=37, num_key_value_heads=2, num_local_experts=3, **sizes)
    )
    weights = naming.to_hub(mixture, naming.tensors_of(mixture))
    save_model(mixture, {name: weight.bfloat16() for name, weight in weights.items()}, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    written = load_file(tmp_path / "model.safetensors")
    assert written["model.layers.0.block_sparse_moe.experts.2.w1.weight"].shape == (24, 16)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in mixture.named_parameters():
        assert torch.equal(parameter.bfloat16(), back.get_parameter(name))


def test_a_checksum_is_of_values_and_shape_whatever_precision_holds_them() -> None:
    weight = torch.tensor([[1.5, -2.0, 0.0], [3.0, 0.25, float("inf")]])
    for same in (weight.bfloat16(), weight.T.contiguous().T, torch.where(weight == 0, -0.0, weight)):
        assert checksum(same) == checksum(weight)
    nudged = weight.clone()
    nudged[1, 1] += 2**-20
    for other in (nudged, nudged.neg(), weight.flatten(), weight.T, weight[:1]):
        assert checksum(other) != checksum(weight)
    assert checksum(torch.tensor([7])) != checksum(torch.tensor([8]))
    assert checksum(torch.tensor(7)) == checksum(torch.tensor(7)) and checksum(torch.zeros(0, 2)) is not None


def test_metadata_is_written(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(1)}, tmp_path / "one.safetensors", metadata={"format": "pt"})
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
