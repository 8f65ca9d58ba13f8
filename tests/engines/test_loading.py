"""Loading of models and tokenizers, and what the user is told when it fails."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rollcli.engines.loading import (
    check_critic,
    check_tokens,
    initialize,
    load_causal_lm,
    load_tokenizer,
    vocabulary_size,
)
from rollcli.errors import EngineError, ModelNotFound


def shared_data(name: str) -> Path:
    """Folder of test data; skips the test where it is absent."""
    root = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
    if not (root / name).exists():
        pytest.skip(f"no test data `{name}` in {root}")
    return root / name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        attention_dropout=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_weights_and_dtype(folder: Path) -> None:
    model = load_causal_lm(str(folder), dtype="auto", device="cpu")
    assert model.dtype == torch.float32 and not model.training
    half = load_causal_lm(str(folder), dtype="bfloat16", device="cpu")
    assert half.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight.bfloat16(), half.lm_head.weight)


def test_every_dropout_is_off(folder: Path, tmp_path: Path) -> None:
    model = load_causal_lm(str(folder), dtype="auto", device="cpu")
    assert model.config.attention_dropout == 0
    assert all(layer.self_attn.attention_dropout == 0 for layer in model.model.layers)
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.4)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    gpt2 = load_causal_lm(str(tmp_path / "gpt2"), dtype="auto", device="cpu").train()
    tokens = torch.arange(8)[None]
    assert torch.equal(gpt2(tokens).logits, gpt2(tokens).logits)


def test_a_critic_of_an_architecture_without_a_token_classifier(tmp_path: Path) -> None:
    """Told from the name of the architecture, before weights are read."""
    check_critic("llama")
    config = transformers.CohereConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.CohereForCausalLM(config).save_pretrained(tmp_path)
    load_causal_lm(str(tmp_path), dtype="auto", device="cpu")
    for load in (
        lambda: check_critic("cohere"),
        lambda: load_causal_lm(str(tmp_path), dtype="auto", device="cpu", critic=True),
        lambda: initialize({"model_type": "cohere"}, seed=0, dtype="auto", device=torch.device("cpu"), attention=None,
                           critic=True),
    ):  # fmt: skip
        with pytest.raises(EngineError, match="a `cohere` model cannot be a critic") as caught:
            load()
        assert "critic.path" in caught.value.hint


def test_a_classifier_of_several_classes_is_no_critic(folder: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_labels = 3
    transformers.LlamaForTokenClassification(config).save_pretrained(tmp_path / "classes")
    with pytest.raises(EngineError, match=r"`score\.bias` .* size \(3,\), where the model wants \(1,\)"):
        load_causal_lm(str(tmp_path / "classes"), dtype="auto", device="cpu", critic=True)


@pytest.mark.parametrize("critic", [False, True])
def test_weights_that_lack_a_tensor_are_refused(folder: Path, critic: bool) -> None:
    """In place of it transformers would put random numbers."""
    weights = load_file(folder / "model.safetensors")
    lost = weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lack `model\.layers\.0\.mlp\.up_proj\.weight`"):
        load_causal_lm(str(folder), dtype="auto", device="cpu", critic=critic)
    weights["model.layers.0.mlp.up_proj.weight"] = lost[1:].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"size \(31, 16\), where the model wants \(32, 16\)"):
        load_causal_lm(str(folder), dtype="auto", device="cpu", critic=critic)


@pytest.mark.parametrize("critic", [False, True])
def test_loading_is_silent(folder: Path, capfd: pytest.CaptureFixture[str], critic: bool) -> None:
    load_causal_lm(str(folder), dtype="auto", device="cpu", critic=critic)
    assert capfd.readouterr() == ("", "")


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(ModelNotFound, match="no such folder") as caught:
        load_causal_lm("./absent/model", dtype="auto", device="cpu")
    assert caught.value.hint


def test_a_hub_name_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (lambda name: load_causal_lm(name, dtype="auto", device="cpu"), load_tokenizer):
        with pytest.raises(ModelNotFound, match="nobody/nothing") as caught:
            load("nobody/nothing")
        assert "folder" in caught.value.hint


@pytest.mark.parametrize(("gone", "message"), [("config.json", "no config.json"), ("model.safetensors", "no weights")])
def test_a_folder_that_lacks_a_file(folder: Path, gone: str, message: str) -> None:
    (folder / gone).unlink()
    with pytest.raises(ModelNotFound, match=message):
        load_causal_lm(str(folder), dtype="auto", device="cpu")


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(EngineError, match="pickled") as caught:
        load_causal_lm(str(folder), dtype="auto", device="cpu")
    assert "safetensors" in caught.value.hint


def test_an_unknown_architecture_and_an_unknown_dtype(folder: Path) -> None:
    with pytest.raises(EngineError, match="dtype `float8`"):
        load_causal_lm(str(folder), dtype="float8", device="cpu")
    (folder / "config.json").write_text(json.dumps({"model_type": "of_the_future"}))
    with pytest.raises(EngineError, match="of_the_future"):
        load_causal_lm(str(folder), dtype="auto", device="cpu")


def test_code_of_a_checkpoint_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": code}))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(EngineError):
        load_causal_lm(str(folder), dtype="auto", device="cpu")


def test_tokenizer_without_a_chat_template() -> None:
    tokenizer = load_tokenizer(str(shared_data("stories260K") / "hf"))
    assert tokenizer.chat_template is None
    assert tokenizer("Once upon a time")["input_ids"] == [1, 403, 407, 261, 378]


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    with pytest.raises((ModelNotFound, EngineError), match="tokenizer"):
        load_tokenizer(str(folder))


def test_the_vocabulary_of_a_model(folder: Path) -> None:
    assert vocabulary_size(str(folder), None, None) == 31
    assert vocabulary_size("absent", None, {"model_type": "llama", "vocab_size": 77}) == 77
    with pytest.raises(ModelNotFound):
        vocabulary_size("./absent/model", None, None)


def test_tokens_that_a_model_does_not_embed() -> None:
    check_tokens("the tokenizer", {"a": 0, "b": 30}, 31)
    check_tokens("the tokenizer", {}, 31)
    message = r"^the tokenizer does not match the model: 2 of its 3 tokens are beyond the 31 .* `c` with number 32"
    with pytest.raises(EngineError, match=message):
        check_tokens("the tokenizer", {"a": 0, "b": 31, "c": 32}, 31)
