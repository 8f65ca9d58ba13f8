"""The translation to and from SGLang, by a stand-in for its engine that counts upwards; the real one needs a GPU."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollcli.config.schema import ModelConfig, ParallelConfig
from rollcli.engines.base import Completion, GenerateRequest, SamplingParams
from rollcli.engines.sglang import SglangEngine, new_tokens, sampling_params
from rollcli.engines.storage import checksum
from rollcli.errors import EngineError, WeightSyncError

CONFIG = transformers.LlamaConfig(
    vocab_size=100, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    max_position_embeddings=64,
)  # fmt: skip


class Counting:
    """Answers with the numbers after the prompt's last token, one a chunk; chunks hold all so far, as SGLang's do."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.aborted: list[str] = []
        self.calls: list[Any] = []
        self.tokenizer_manager = SimpleNamespace(abort_request=lambda rid: self.aborted.append(rid))

    async def async_generate(self, input_ids: list[int], sampling_params: dict, rid: str, **_: Any) -> AsyncIterator:
        async def chunks() -> AsyncIterator[dict]:
            count = sampling_params["max_new_tokens"]
            for sampled in range(1, count + 1):
                await asyncio.sleep(0)
                triples = [(-0.5, input_ids[-1] + place, None) for place in range(1, sampled + 1)]
                finish = {"type": "length"} if sampled == count else None
                yield {"meta_info": {"output_token_logprobs": triples, "finish_reason": finish}}

        return chunks()

    def update_weights_from_tensor(self, named: list) -> tuple[bool, str]:
        self.calls.append([name for name, _ in named])
        return True, ""

    def flush_cache(self) -> None:
        self.calls.append("flush")

    def release_memory_occupation(self) -> None:
        self.calls.append("release")

    def resume_memory_occupation(self) -> None:
        self.calls.append("resume")


def engine(max_rows: int = 4) -> SglangEngine:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIG)
    decode = lambda tokens: "".join(f"<{token}>" for token in tokens)  # noqa: E731
    return SglangEngine(Counting(), model, max_rows=max_rows, max_context=64, decode=decode)


def request(name: str = "a", prompt: Sequence[int] = (1, 2), max_tokens: int = 4, **changes: Any) -> GenerateRequest:
    stream = changes.pop("stream", False)
    return GenerateRequest(name, np.array(prompt, dtype=np.int32), 5, SamplingParams(max_tokens, **changes), stream)


def run(engine: SglangEngine) -> list[Completion]:
    done = []
    while engine.pending:
        done += engine.step()
    return done


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_a_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(EngineError, match="sglang") as caught:
        SglangEngine.load(
            ModelConfig(path="x"), device=torch.device("cpu"), seed=0, max_rows=1, parallel=ParallelConfig()
        )
    assert "pip install 'rollcli[sglang]'" in caught.value.hint


def test_parameters_of_a_request() -> None:
    asked = request(prompt=[1] * 60, max_tokens=10, temperature=0.5, top_k=7, stop_token_ids=(3,), min_tokens=2)
    params = sampling_params(asked, 64)
    assert params["max_new_tokens"] == 4 and params["min_new_tokens"] == 2 and params["stop_token_ids"] == [3]
    assert params["top_k"] == 7 and sampling_params(request(), 64)["top_k"] == -1
    assert 0 <= params["sampling_seed"] < 2**31


def test_new_tokens_are_those_not_yet_known() -> None:
    triples = [(-0.1, 5, None), (-0.2, 6, None), (-0.3, 7, None)]
    chunk = {"meta_info": {"output_token_logprobs": triples, "finish_reason": None}}
    assert new_tokens(chunk, 1) == ([6, 7], [-0.2, -0.3], None)
    for said, meant in (("stop", "stop"), ("length", "length"), ("abort", "error")):
        chunk["meta_info"]["finish_reason"] = {"type": said}
        assert new_tokens(chunk, 3) == ([], [], meant)


def test_answers_come_back_whole_and_streamed() -> None:
    served = engine(max_rows=1)
    served.add([request(), request("b", (9,), 2), request("refused", ())])
    done = {each.id: each for each in run(served)}
    assert done["a"].tokens.tolist() == [3, 4, 5, 6] and done["a"].stop_reason == "length"
    assert done["b"].tokens.tolist() == [10, 11] and done["refused"].stop_reason == "error"
    served.add([request(stream=True)])
    parts = run(served)
    assert np.concatenate([part.tokens for part in parts]).tolist() == [3, 4, 5, 6]
    assert [part.stop_reason for part in parts] == [None] * 3 + ["length"]


def test_a_stop_text_ends_an_answer_that_sglang_goes_on_with() -> None:
    served = engine()
    served.add([request(stop=("4><5",))])
    [done] = run(served)
    assert done.tokens.tolist() == [3, 4, 5] and done.stop_reason == "stop"
    assert served._engine.aborted == ["a"]


def test_abort_returns_what_there_is() -> None:
    served = engine(max_rows=1)
    served.add([request(max_tokens=30), request("b")])
    served.step()
    served.step()
    served.abort(["a", "b", "never seen"])
    done = {each.id: each for each in run(served)}
    assert {each.stop_reason for each in done.values()} == {"abort"}
    count = len(done["a"].tokens)
    assert 2 <= count < 30 and done["a"].tokens.tolist() == list(range(3, 3 + count)) and len(done["b"].tokens) == 0


def test_a_request_that_sglang_fails_comes_back_with_the_reason_and_others_go_on() -> None:
    served = engine()
    generate = served._engine.async_generate

    async def failing(rid: str, **asked: Any) -> AsyncIterator:
        if rid == "bad":
            raise ValueError("too long for it")
        return await generate(rid=rid, **asked)

    served._engine.async_generate = failing
    served.add([request("bad"), request()])
    done = {each.id: each for each in run(served)}
    assert done["bad"].stop_reason == "error" and "too long for it" in done["bad"].error
    assert done["a"].tokens.tolist() == [3, 4, 5, 6]


def test_requests_in_flight_go_on_under_new_weights() -> None:
    served = engine()
    served.add([request(max_tokens=30)])
    served.step()
    served.step()
    weights = {name: torch.ones(shape) for name, shape in served.weight_shapes().items()}
    served.load_weights(weights, version=3)
    [done] = run(served)
    assert done.tokens.tolist() == list(range(3, 33))
    old = int((done.versions == 0).sum())
    assert 2 <= old < 30 and done.versions.tolist() == [0] * old + [3] * (30 - old)
    assert served._engine.calls == [list(weights), "flush"]
    assert served.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}
    del weights["model.norm.weight"]
    with pytest.raises(WeightSyncError, match="missing"):
        served.load_weights(weights, version=4)
    assert served.version == 3


def test_offload_keeps_the_tokens() -> None:
    served = engine()
    served.add([request()])
    served.step()
    served.offload()
    served.onload()
    [done] = run(served)
    assert done.tokens.tolist() == [3, 4, 5, 6] and served._engine.calls == ["release", "resume"]
