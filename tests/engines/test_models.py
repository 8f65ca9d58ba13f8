"""The recipe's model: precision, random starts, and the tokens that end a turn."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers

from rollcli.config.schema import ModelConfig
from rollcli.engines.models import load_chat_format, load_critic, load_policy, load_policy_tokenizer
from rollcli.errors import ConfigError, EngineError, ModelNotFound
from tests.engines import vision_model as small

CPU = torch.device("cpu")
SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a tokenizer whose end token is `</s>` and generation settings that name another one too."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_dropout=0.5)).save_pretrained(tmp_path)
    backend = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": None,
        "added_tokens": [
            {"id": number, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False} for number, text in enumerate(["<unk>", "</s>", "<end>"])
        ],
        "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "</s>": 1, "<end>": 2, "hi": 3}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize(
    ("dtype", "rollout"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_masters_are_float32_whatever_the_recipe_says(folder: Path, dtype, rollout: torch.dtype) -> None:
    for config in (ModelConfig(str(folder), dtype=dtype),
                   ModelConfig(str(folder), dtype=dtype, initialize={"model_type": "llama", **SIZES})):  # fmt: skip
        assert load_policy(config, CPU, 0).dtype == rollout
        assert load_policy(config, CPU, 0, training=True).dtype == torch.float32


def test_every_dropout_is_off(folder: Path) -> None:
    options = {"model_type": "gpt2", "vocab_size": 37, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    for config in (ModelConfig(str(folder)), ModelConfig("absent", initialize=options)):
        model = load_policy(config, CPU, 0, training=True).train()
        ids = torch.arange(8)[None]
        assert torch.equal(model(ids).logits, model(ids).logits)


def test_random_weights_follow_the_seed(folder: Path) -> None:
    config = ModelConfig(str(folder), initialize={"model_type": "llama", **SIZES})
    first, again, other = (load_policy(config, CPU, seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert config.initialize == {"model_type": "llama", **SIZES}


def test_attention_is_the_recipes(folder: Path) -> None:
    for initialize in (None, {"model_type": "llama", **SIZES}):
        config = ModelConfig(str(folder), attention="eager", initialize=initialize)
        assert load_policy(config, CPU, 0).config._attn_implementation == "eager"


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        load_policy(ModelConfig(str(tmp_path / "absent")), CPU, 0)


# --- critics


def test_a_critic_has_the_policys_backbone_bit_for_bit_and_a_head_of_0(folder: Path) -> None:
    for dtype in ("auto", "bfloat16"):
        critic = load_critic(ModelConfig(str(folder), dtype=dtype, attention="eager"), None, CPU, 0)
        assert critic.dtype == torch.float32 and critic.config._attn_implementation == "eager"
        weights = dict(critic.named_parameters())
        heads = {name: weights.pop(name) for name in list(weights) if name.startswith("score.")}
        assert heads["score.weight"].shape == (1, 16) and not any(head.any() for head in heads.values())
        policy = dict(load_policy(ModelConfig(str(folder)), CPU, 0, training=True).named_parameters())
        assert set(policy) - set(weights) == {"lm_head.weight"} and set(weights) <= set(policy)
        assert all(torch.equal(weight, policy[name]) for name, weight in weights.items())
        assert not critic(torch.arange(5)[None]).logits.any()


def test_a_critic_of_random_weights(folder: Path) -> None:
    config = ModelConfig(str(folder), initialize={"model_type": "llama", **SIZES})
    first, again, other = (load_critic(config, None, CPU, seed) for seed in (0, 0, 1))
    name = "model.layers.0.mlp.up_proj.weight"
    weights = [critic.get_parameter(name) for critic in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert not first.score.weight.any()
    assert config.initialize == {"model_type": "llama", **SIZES}


def test_a_critic_of_its_own(folder: Path, tmp_path: Path) -> None:
    """The model at the critic's path, with the head that one has, also where the policy starts at random."""
    trained = load_critic(ModelConfig(str(folder)), None, CPU, 0)
    torch.nn.init.normal_(trained.score.weight)
    torch.nn.init.ones_(trained.score.bias)
    trained.save_pretrained(tmp_path / "critic")
    initialize = {"model_type": "llama", **SIZES}
    for config in (ModelConfig("absent", revision="a"), ModelConfig("absent", revision="a", initialize=initialize)):
        critic = load_critic(config, str(tmp_path / "critic"), CPU, 0)
        assert all(torch.equal(weight, trained.get_parameter(name)) for name, weight in critic.named_parameters())
    with pytest.raises(ModelNotFound):
        load_critic(ModelConfig(str(folder)), str(tmp_path / "absent"), CPU, 0)


def test_every_dropout_of_a_critic_is_off(folder: Path) -> None:
    """Its class brings one of its own before the head, of 0.1 where the configuration says nothing."""
    gpt2 = {"model_type": "gpt2", "vocab_size": 37, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    for config in (ModelConfig(str(folder)), ModelConfig("absent", initialize=gpt2)):
        critic = load_critic(config, None, CPU, 0).train()
        head = critic.score if hasattr(critic, "score") else critic.classifier
        torch.nn.init.normal_(head.weight)
        ids = torch.arange(8)[None]
        assert torch.equal(critic(ids).logits, critic(ids).logits) and critic(ids).logits.shape == (1, 8, 1)


# --- tokens


def test_a_tokenizer_must_match_the_model(folder: Path) -> None:
    """By the embedding, of the model that is there or of the one that is made."""
    assert len(load_policy_tokenizer(ModelConfig(str(folder)))) == 4
    small = ModelConfig(str(folder), initialize={"model_type": "llama", **SIZES, "vocab_size": 3})
    with pytest.raises(EngineError, match=r"tokenizer of .*: 1 of its 4 tokens are beyond the 3 .*`hi` with number 3"):
        load_policy_tokenizer(small)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 3}))
    with pytest.raises(EngineError, match="`hi` with number 3"):
        load_chat_format(ModelConfig(str(folder), chat_template="plain"))


def test_what_ends_a_turn_must_be_a_token_of_the_model(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 37]}))
    with pytest.raises(EngineError, match=r"generation_config\.json.* beyond the 37 .* 37"):
        load_chat_format(ModelConfig(str(folder), chat_template="plain"))


# --- what ends a turn


@pytest.mark.parametrize(("stop", "ends"), [(None, (1,)), (1, (1,)), (2, (1, 2)), ([1, 2, 3], (1, 2, 3))])
def test_turns_end_with_the_tokenizers_token_and_the_generation_settings(folder: Path, stop, ends: tuple) -> None:
    settings = {} if stop is None else {"eos_token_id": stop}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert load_chat_format(ModelConfig(str(folder), chat_template="plain")).stop_token_ids == ends


def test_generation_settings_may_be_absent_and_are_found_wherever_the_model_is(folder: Path, monkeypatch) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert load_chat_format(ModelConfig(str(folder), chat_template="plain")).stop_token_ids == (1,)
    asked = []

    def from_pretrained(path: str, revision: str | None = None) -> transformers.GenerationConfig:
        asked.append((path, revision))
        return transformers.GenerationConfig(eos_token_id=[2])

    tokenizer = load_policy_tokenizer(ModelConfig(str(folder)))
    monkeypatch.setattr("rollcli.engines.models.load_policy_tokenizer", lambda config: tokenizer)
    monkeypatch.setattr("rollcli.engines.models.load_vision_format", lambda config: None)
    monkeypatch.setattr("transformers.GenerationConfig.from_pretrained", from_pretrained)
    hub = load_chat_format(ModelConfig("someone/model", revision="abc", chat_template="plain"))
    assert hub.stop_token_ids == (1, 2) and asked == [("someone/model", "abc")]


def test_chat_template_is_the_recipes_or_the_models(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        load_chat_format(ModelConfig(str(folder)))
    assert (
        load_chat_format(ModelConfig(str(folder), chat_template="plain")).prompt([{"content": "hi"}]).dtype == "int32"
    )


def test_the_real_one() -> None:
    root = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
    if not (root / "stories260K").exists():
        pytest.skip(f"no test data `stories260K` in {root}")
    config = ModelConfig(str(root / "stories260K" / "hf"), chat_template="plain")
    assert load_chat_format(config).stop_token_ids == (2,)
    assert sum(p.numel() for p in load_policy(config, CPU, 0).parameters()) == 260_032


def test_a_vision_language_model_is_shown_images_by_its_own_processor(tmp_path: Path, folder: Path) -> None:
    seeing = small.save(tmp_path / "seeing")
    chat = load_chat_format(ModelConfig(str(seeing)))
    assert (
        chat.vision.placeholder == small.SPECIAL.index("<|image|>") and chat.forbidden == small.chat_format().forbidden
    )
    expected = small.image_processor()(images=[small.picture("red")], return_tensors="np")
    made = chat.vision.tensors([small.picture("red")])
    assert made.keys() == expected.keys() and all((made[name] == expected[name]).all() for name in made)
    policy = load_policy(ModelConfig(str(seeing)), CPU, 0, training=True)
    assert type(policy).__name__ == "Qwen2VLForConditionalGeneration"
    random = load_policy(ModelConfig(str(seeing), initialize=small.config("qwen3_vl")), CPU, 0)
    assert type(random).__name__ == "Qwen3VLForConditionalGeneration"
    assert load_chat_format(ModelConfig(str(folder), chat_template="plain")).vision is None
    (seeing / "preprocessor_config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"no preprocessor_config\.json"):
        load_chat_format(ModelConfig(str(seeing)))
