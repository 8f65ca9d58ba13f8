"""What every rollout engine must do, asked of each that this machine has; where an answer is defined, of one loop.

The loop is a plain forward pass per token of the `transformers` model, and an inverse of its cumulative distribution.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollcli.config.schema import ModelConfig, ParallelConfig
from rollcli.engines import storage
from rollcli.engines.base import Completion, GenerateRequest, SamplingParams
from rollcli.engines.character_tokenizer import character_tokenizer
from rollcli.engines.sampling import uniforms
from rollcli.engines.transformers import TransformersEngine
from rollcli.errors import EngineError, WeightSyncError

spec = importlib.util.spec_from_file_location("engine_process", Path(__file__).with_name("engine_process.py"))
engine_process = sys.modules["engine_process"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine_process)

TOKENIZER = character_tokenizer()
VOCABULARY = len(TOKENIZER)
CONTEXT = 160
ROWS = 6
CPU = torch.device("cpu")


def tiny(seed: int = 0) -> transformers.PreTrainedModel:
    """A random model; sharp enough that answers differ."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        head_dim=32, num_key_value_heads=1, max_position_embeddings=CONTEXT, initializer_range=0.25,
        tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


OLD, NEW = tiny(0), tiny(1)


def weights(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine that serves `OLD` with a tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    OLD.save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    if request.param == "transformers":
        config = ModelConfig(path=str(folder / "model"))
        yield TransformersEngine.load(config, device=CPU, seed=0, max_rows=ROWS, parallel=ParallelConfig())
        return
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    remote = engine_process.Remote(folder, "vllm", {"path": str(folder / "model")}, max_rows=ROWS)
    yield remote
    remote.close()


@pytest.fixture
def engine(served: Any) -> Iterator[Any]:
    """The engine with nothing in flight, serving version 0 of `OLD`."""
    served.load_weights(weights(OLD), version=0)
    yield served
    served.abort([f"{name}" for name in range(100)])
    while served.pending:
        served.step()


def request(
    name: object = "0", prompt: Sequence[int] = (11, 12, 13), seed: int = 0, max_tokens: int = 12, stream: bool = False,
    drawn: int = 0, **sampling: Any,
) -> GenerateRequest:  # fmt: skip
    tokens = np.array(prompt, dtype=np.int32)
    return GenerateRequest(str(name), tokens, seed, SamplingParams(max_tokens, **sampling), stream, drawn)


def run(engine: Any, requests: Sequence[GenerateRequest]) -> dict[str, Completion]:
    engine.add(requests)
    done: dict[str, Completion] = {}
    while engine.pending:
        for completion in engine.step():
            assert completion.id not in done
            done[completion.id] = completion
    return done


@torch.no_grad()
def expected(asked: GenerateRequest, model: transformers.PreTrainedModel = OLD) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of an answer, by one pass over everything for each token."""
    model.set_attn_implementation("eager")
    sampling, tokens, logprobs = asked.sampling, asked.prompt.tolist(), []
    answer: list[int] = []
    while len(answer) < min(sampling.max_tokens, CONTEXT - len(asked.prompt)):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        distribution = torch.softmax(logits / (sampling.temperature or 1), -1).numpy()
        allowed = distribution.copy()
        if len(answer) < sampling.min_tokens:
            allowed[list(sampling.stop_token_ids)] = 0
            allowed /= allowed.sum()
        order = np.argsort(-allowed, kind="stable")
        before = np.cumsum(allowed[order]) - allowed[order]
        kept = order[(before < sampling.top_p) & (np.arange(VOCABULARY) < (sampling.top_k or VOCABULARY))]
        filtered = np.where(np.isin(np.arange(VOCABULARY), kept), allowed, 0.0)
        target = uniforms(np.array([asked.seed]), np.array([asked.drawn + len(answer)]))[0] * filtered.sum()
        token = int(np.searchsorted(np.cumsum(filtered), target, side="right"))
        token = int(allowed.argmax()) if sampling.temperature == 0 else token
        logprobs.append(float(np.log(distribution[token])))
        answer.append(token)
        tokens.append(token)
        if token in sampling.stop_token_ids:
            break
        text, before = TOKENIZER.decode(answer), TOKENIZER.decode(answer[:-1])
        if len(answer) > sampling.min_tokens and any(text.count(stop) > before.count(stop) for stop in sampling.stop):
            break
    return answer, logprobs


def check(asked: Sequence[GenerateRequest], done: dict[str, Completion]) -> None:
    """Compares answers of the engine with those of the loop."""
    for each in asked:
        tokens, logprobs = expected(each)
        completion = done[each.id]
        assert completion.tokens.tolist() == tokens, each
        assert np.abs(completion.logprobs - logprobs).max() < 1e-4
        if not each.sampling.stop:
            stopped = tokens[-1] in each.sampling.stop_token_ids
            assert completion.stop_reason == ("stop" if stopped else "length")


SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 3},
    "all": {"temperature": 1.4, "top_p": 0.8, "top_k": 5},
    "minimum": {"min_tokens": 5, "stop_token_ids": tuple(range(20, 70))},
    "greedy minimum": {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": tuple(range(6, 102, 2))},
    "stop tokens": {"stop_token_ids": tuple(range(20, 40))},
}


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_answers_are_those_of_the_loop(engine: Any, sampling: dict) -> None:
    prompts = [(5,), (11, 12, 13), tuple(range(40)), tuple(range(90))]
    asked = [request(index, prompt, seed=31 + index, **sampling) for index, prompt in enumerate(prompts)]
    check(asked, run(engine, asked))


def test_narrow_filters_leave_the_most_probable(engine: Any) -> None:
    greedy = run(engine, [request(temperature=0.0)])["0"].tokens.tolist()
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        assert run(engine, [request(seed=5, **narrow)])["0"].tokens.tolist() == greedy


def test_below_the_minimum_the_one_token_left_is_taken(engine: Any) -> None:
    """Also where filters would leave only a stop token; its log-probability is that among all tokens."""
    all_but_one = tuple(token for token in range(VOCABULARY) if token != 50)
    settings = ({}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0.0})
    asked = [
        request(index, max_tokens=4, min_tokens=3, stop_token_ids=all_but_one, **each)
        for index, each in enumerate(settings)
    ]
    done = run(engine, asked)
    check(asked, done)
    assert all(answer.tokens[:3].tolist() == [50] * 3 for answer in done.values())


def test_seeds_make_answers_whatever_the_company(engine: Any) -> None:
    asked = [request(index, seed=index, temperature=1.2) for index in range(2 * ROWS + 1)]
    together = run(engine, asked)
    assert len({answer.tokens.tobytes() for answer in together.values()}) > ROWS
    for each in asked[::5]:
        alone = run(engine, [each])[each.id]
        assert alone.tokens.tolist() == together[each.id].tokens.tolist()
        np.testing.assert_allclose(alone.logprobs, together[each.id].logprobs, rtol=0, atol=1e-5)


def test_huge_and_negative_seeds_are_taken(engine: Any) -> None:
    done = run(engine, [request(0, seed=-1), request(1, seed=2**64 - 1), request(2, seed=2**70)])
    assert done["0"].tokens.tolist() == done["1"].tokens.tolist()


def test_stop_texts_end_answers_across_tokens_and_belong_to_them(engine: Any) -> None:
    free = run(engine, [request(seed, (20, 30), seed, 30) for seed in range(60)])
    seed, answer = next((int(name), each) for name, each in free.items() if min(each.tokens) > 5)  # no special token
    text = TOKENIZER.decode(answer.tokens)
    stop = text[7:11]
    asked = [
        request(0, (20, 30), seed, 30, stop=(stop, "never, ever")),
        request(1, (20, 30), seed, 30, stop=(text[3:5],), min_tokens=4),  # begins before, ends at the fifth token
        request(2, (20, 30), seed, 30, stop=(text[3:5],), min_tokens=5),  # ends within the minimum: does not count
        request(3, (20, 30), seed, 30, stop=("never, ever",)),
        request(4, (20, 30), seed, 9, stop=(text[7:9],)),  # with the last token: a stop, not the length
    ]
    done = run(engine, asked)
    check(asked, done)
    assert TOKENIZER.decode(done["0"].tokens) == text[: text.index(stop) + len(stop)]
    assert [done[name].stop_reason for name in "01234"] == ["stop", "stop", "length", "length", "stop"]


def test_a_stop_text_begun_before_an_interruption_ends_the_answer_and_one_in_the_prompt_does_not(engine: Any) -> None:
    whole = run(engine, [request(prompt=(20, 30), seed=8, max_tokens=30)])["0"]
    stop = TOKENIZER.decode(whole.tokens[4:8])
    asked = request(prompt=(20, 30), seed=8, max_tokens=30, stop=(stop,))
    engine.add([asked])
    for _ in range(6):
        assert engine.step() == []
    engine.abort(["0"])
    [part] = engine.step()
    rest = run(engine, [asked.after(part)])["0"]
    assert part.then(rest).tokens.tolist() == whole.tokens[:8].tolist() and rest.stop_reason == "stop"
    fresh = request(prompt=[20, 30, *whole.tokens[:6]], seed=8, max_tokens=24, stop=(stop,))
    assert stop not in TOKENIZER.decode(run(engine, [fresh])["0"].tokens[:2])


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_an_interrupted_answer_goes_on_with_the_draws_it_would_have_had(engine: Any, temperature: float) -> None:
    asked = request(seed=4, max_tokens=10, temperature=temperature)
    whole = run(engine, [asked])["0"]
    engine.add([asked])
    for _ in range(4):
        engine.step()
    engine.abort(["0"])
    [part] = engine.step()
    assert part.stop_reason == "abort" and len(part.tokens) == 4
    joined = part.then(run(engine, [asked.after(part)])["0"])
    assert joined.tokens.tolist() == whole.tokens.tolist() and joined.stop_reason == "length"
    np.testing.assert_allclose(joined.logprobs, whole.logprobs, rtol=0, atol=1e-5)


def test_abort_ends_what_waits_and_what_runs(engine: Any) -> None:
    asked = [request(index, seed=index, max_tokens=9) for index in range(ROWS + 2)]
    whole = run(engine, asked)
    engine.add(asked)
    for _ in range(3):
        assert engine.step() == []
    engine.abort(["1", str(ROWS + 1), "never seen"])
    assert engine.pending == ROWS + 2
    ended = {completion.id: completion for completion in engine.step()}
    assert {name: completion.stop_reason for name, completion in ended.items()} == dict.fromkeys(["1", "7"], "abort")
    assert ended["1"].tokens.tolist() == whole["1"].tokens[:3].tolist() and len(ended["7"].tokens) == 0
    rest = run(engine, [])
    assert {name: c.tokens.tolist() for name, c in rest.items()} == {
        name: c.tokens.tolist() for name, c in whole.items() if name not in ended
    }
    assert len(run(engine, [request("1")])) == 1  # the name is free again


def test_more_requests_than_rows_wait_in_order(engine: Any) -> None:
    engine.add([request(index, seed=index, max_tokens=3) for index in range(2 * ROWS + 1)])
    finished = []
    while engine.pending:
        finished.append([int(completion.id) for completion in engine.step()])
    assert [sorted(each) for each in finished if each] == [
        list(range(ROWS)), list(range(ROWS, 2 * ROWS)), [2 * ROWS]
    ]  # fmt: skip
    assert len(finished) == 9


def test_streamed_parts_add_up(engine: Any) -> None:
    whole = run(engine, [request(max_tokens=5)])["0"]
    engine.add([request(0, max_tokens=5, stream=True), request(1, max_tokens=5)])
    parts = []
    while engine.pending:
        parts += [completion for completion in engine.step() if completion.id == "0"]
    assert [(len(part.tokens), part.stop_reason) for part in parts] == [(1, None)] * 4 + [(1, "length")]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.then(part)
    assert joined.tokens.tolist() == whole.tokens.tolist() and joined.versions.tolist() == [0] * 5
    np.testing.assert_allclose(joined.logprobs, whole.logprobs, rtol=0, atol=1e-5)


def test_what_cannot_be_served_comes_back_with_the_reason(engine: Any) -> None:
    refused = {
        "empty": {"prompt": []},
        "vocabulary": {"prompt": [VOCABULARY]},
        f"prompt of {CONTEXT} tokens does not fit": {"prompt": [7] * CONTEXT},
        "max_tokens": {"max_tokens": 0},
        "temperature": {"temperature": -1.0},
        "top_p": {"top_p": 0.0},
        "stop text": {"stop": ("",)},
    }
    done = run(engine, [*(request(why, **changes) for why, changes in refused.items()), request("good")])
    for why in refused:
        assert done[why].stop_reason == "error" and why in done[why].error and len(done[why].tokens) == 0
    assert len(done["good"].tokens) == 12


def test_answers_fill_the_context_and_no_more(engine: Any) -> None:
    done = run(engine, [request(0, [7] * (CONTEXT - 3), max_tokens=50), request(1, [7] * (CONTEXT - 1))])
    assert (len(done["0"].tokens), len(done["1"].tokens)) == (3, 1)
    assert done["0"].stop_reason == done["1"].stop_reason == "length"
    assert engine.max_context == CONTEXT


def test_an_id_in_flight_is_refused(engine: Any) -> None:
    engine.add([request()])
    with pytest.raises(EngineError, match="in flight"):
        engine.add([request()])


@torch.no_grad()
def test_requests_in_flight_go_on_under_new_weights_with_the_cache_of_the_old(engine: Any) -> None:
    engine.add([request(seed=3, max_tokens=9), request(1, seed=4, max_tokens=9)])
    for _ in range(4):
        engine.step()
    engine.load_weights(weights(NEW), version=5)
    assert engine.version == 5
    done = run(engine, [request(2, seed=6)])
    for name in "01":
        assert done[name].versions.tolist() == [0] * 4 + [5] * 5
    # Old keys and values for all but the newest token of the time, then new weights, one token at a time.
    answer = done["0"]
    tokens = [11, 12, 13, *answer.tokens.tolist()]
    OLD.set_attn_implementation("eager")
    NEW.set_attn_implementation("eager")
    cache = OLD(torch.tensor([tokens[:6]]), use_cache=True).past_key_values
    for place in range(6, 11):
        logits = NEW(torch.tensor([[tokens[place]]]), past_key_values=cache, use_cache=True).logits[0, -1]
        logprob = torch.log_softmax(logits, -1)[tokens[place + 1]]
        assert abs(float(logprob) - answer.logprobs[place - 2]) < 1e-4
    new, _ = expected(request(2, seed=6), NEW)
    assert done["2"].tokens.tolist() == new and done["2"].versions.tolist() == [5] * 12


def test_what_waits_during_a_sync_is_sampled_by_the_new_weights_alone(engine: Any) -> None:
    long = tuple(range(100)) + (3, 4, 5) * 13  # longer than a block of any cache, and cached by the first request
    run(engine, [request(0, long, max_tokens=2)])
    engine.add([request(index, long, seed=index, max_tokens=4) for index in range(ROWS + 2)])
    engine.load_weights(weights(NEW), version=1)
    done = run(engine, [])
    for index in (0, ROWS + 1):
        tokens, logprobs = expected(request(index, long, seed=index, max_tokens=4), NEW)
        assert done[str(index)].tokens.tolist() == tokens
        assert np.abs(done[str(index)].logprobs - logprobs).max() < 1e-4


def test_no_prefix_of_old_weights_is_served_after_a_sync(engine: Any) -> None:
    long = tuple(range(100)) + (3, 4, 5) * 13
    first = run(engine, [request(0, long, max_tokens=4)])["0"]
    again = run(engine, [request(0, long, max_tokens=4)])["0"]
    assert again.tokens.tolist() == first.tokens.tolist()
    for model, version in ((NEW, 0), (OLD, 0)):  # whatever the version is called
        engine.load_weights(weights(model), version=version)
        tokens, logprobs = expected(request(0, long, max_tokens=4), model)
        done = run(engine, [request(0, long, max_tokens=4)])["0"]
        assert done.tokens.tolist() == tokens and np.abs(done.logprobs - logprobs).max() < 1e-4


def test_a_pause_is_not_stepping(engine: Any) -> None:
    whole = run(engine, [request(index, seed=index) for index in range(3)])
    engine.add([request(index, seed=index) for index in range(3)])
    for _ in range(5):
        engine.step()
    engine.load_weights(weights(OLD), version=7)
    engine.offload()
    engine.onload()
    engine.load_weights(weights(OLD), version=8)
    done = run(engine, [])
    for name, answer in done.items():
        assert answer.tokens.tolist() == whole[name].tokens.tolist()
        assert answer.versions.tolist() == [0] * 5 + [8] * 7


@pytest.mark.parametrize("damage", ["unknown", "missing", "of another shape"])
def test_weights_that_do_not_match_leave_the_old_ones(engine: Any, damage: str) -> None:
    broken = weights(NEW)
    if damage == "unknown":
        broken["model.extra"] = torch.zeros(1)
    elif damage == "missing":
        del broken["model.norm.weight"]
    else:
        broken["model.norm.weight"] = torch.zeros(65)
    before = engine.checksums()
    with pytest.raises(WeightSyncError, match=damage):
        engine.load_weights(broken, version=9)
    assert engine.version == 0 and engine.checksums() == before
    check([request()], run(engine, [request()]))


def test_weights_are_known_by_their_names_on_the_hub(engine: Any) -> None:
    assert engine.weight_shapes() == {name: tuple(tensor.shape) for name, tensor in OLD.named_parameters()}
    engine.load_weights(weights(NEW), version=1)
    assert engine.checksums() == {name: storage.checksum(tensor) for name, tensor in NEW.named_parameters()}


def test_a_tied_head_may_come_too(engine: Any) -> None:
    both = weights(NEW) | {"lm_head.weight": weights(NEW)["model.embed_tokens.weight"]}
    engine.load_weights(both, version=2)
    tokens, _ = expected(request(), NEW)
    assert run(engine, [request()])["0"].tokens.tolist() == tokens
    both["lm_head.weight"] = both["lm_head.weight"] + 1
    with pytest.raises(WeightSyncError, match="tied"):
        engine.load_weights(both, version=3)


def test_counters_count(engine: Any) -> None:
    before = engine.stats()
    run(engine, [request(index, [17 + index, 18, 19], max_tokens=4) for index in range(3)])
    grown = {name: value - before[name] for name, value in engine.stats().items()}
    assert grown["sampled_tokens"] == 12 and grown["steps"] == 4
    assert 6 <= grown["prefill_tokens"] <= 9  # an engine may count the last token of a prompt to the first step
    assert 0 < grown["model_s"] <= grown["busy_s"]
