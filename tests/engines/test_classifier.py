"""A classifier's scores against transformers itself, on random models: batched, padded, and so on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from rollcli.config.schema import ModelConfig
from rollcli.engines.classifier import MOST_TOKENS, Classifier, _parts
from rollcli.errors import ConfigError, EngineError
from rollcli.runs.locations import resolve_model

SIZES = {
    "vocab_size": 110, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CPU = torch.device("cpu")
CHATS = [
    [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": text}]
    for text in ("2", "", "about two, or 3 - 1", "2" * 40)
]


@pytest.fixture(scope="module", params=[("qwen2", None, 1), ("llama", 0, 3), ("llama", 5, 1)])
def folder(request, tmp_path_factory):
    """A random model of each family; padding token: none, one of its own, the one that ends a turn."""
    kind, padding, labels = request.param
    folder = tmp_path_factory.mktemp("model")
    config = transformers.AutoConfig.for_model(kind, **SIZES, pad_token_id=padding, num_labels=labels)
    torch.manual_seed(1)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(resolve_model("embedded:sums")).save_pretrained(folder)
    return folder


def test_scores_are_those_of_transformers_one_by_one(folder):
    classifier = Classifier(ModelConfig(str(folder)), CPU, 0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    for chat in CHATS:
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected.append(model(input_ids=ids).logits[0].numpy())
        assert classifier.tokens(chat).tolist() == ids[0].tolist()
    found = classifier.logits([classifier.tokens(chat) for chat in CHATS])
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-6)
    assert classifier.max_context == 64


def test_rows_that_have_every_token_go_one_by_one(folder):
    classifier = Classifier(ModelConfig(str(folder)), CPU, 0)
    everything = np.arange(SIZES["vocab_size"], dtype=np.int32)
    rows = [everything[:60], everything[55:], np.array([7], np.int32)]
    found = classifier.logits(rows)
    np.testing.assert_allclose(found, np.concatenate([classifier.logits([row]) for row in rows]), atol=1e-6)


def test_a_response_ends_no_turn(folder):
    classifier = Classifier(ModelConfig(str(folder)), CPU, 0)
    tokenizer = classifier.tokenizer
    said = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "3<|end|><|user|>thanks"}]
    ids = classifier.tokens(said).tolist()
    end, user = tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>"])
    assert (ids.count(end), ids.count(user)) == (2, 1)


def test_a_model_that_is_no_classifier_is_refused():
    with pytest.raises(EngineError, match=r"lack `score\.weight`"):
        Classifier(ModelConfig("embedded:sums"), CPU, 0)


def test_a_random_model_and_a_plain_template():
    settings = {"model_type": "llama", **SIZES, "num_labels": 2}
    classifier = Classifier(ModelConfig("embedded:sums", initialize=settings, chat_template="plain"), CPU, 3)
    ids = classifier.tokens(CHATS[0])
    assert classifier.tokenizer.decode(ids) == "1 + 1\n2\n" and classifier.logits([ids]).shape == (1, 2)


def test_a_chat_that_the_template_refuses():
    template = "{{ raise_exception('roles must alternate') }}"
    settings = {"model_type": "llama", **SIZES}
    classifier = Classifier(ModelConfig("embedded:sums", initialize=settings, chat_template=template), CPU, 0)
    with pytest.raises(ConfigError, match="roles must alternate"):
        classifier.tokens(CHATS[0])


def test_passes_hold_what_fits_and_every_row_once():
    lengths = [9000, 10, 8000, 20, MOST_TOKENS + 1, 30]
    parts = list(_parts(lengths))
    assert sorted(number for part in parts for number in part) == list(range(6))
    assert all(len(part) == 1 or max(lengths[n] for n in part) * len(part) <= MOST_TOKENS for part in parts)
