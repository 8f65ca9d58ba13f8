"""The continuous-batching engine against one full forward pass per answer, and against itself in other company."""

import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from rollcli.engines.base import Completion, GenerateRequest, SamplingParams
from rollcli.engines.loading import load_causal_lm, load_tokenizer
from rollcli.engines.transformers import TransformersEngine
from rollcli.errors import EngineError, WeightSyncError

VOCABULARY = 50
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def tiny(kind: str = "llama", seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    """A random model small enough to run hundreds of steps in a second; sharp enough that answers differ."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 60, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = CONFIGS[kind](**(settings | changes))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def stories() -> Path:
    """Folder of a small trained model; skips the test where it is absent."""
    root = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
    folder = root / "stories260K" / "hf"
    if not folder.exists():
        pytest.skip(f"no test data at {folder}")
    return folder


def request(
    name: object = "a", prompt: Sequence[int] = (1, 2, 3), seed: int = 0, max_tokens: int = 8, stream: bool = False,
    **sampling: object,
) -> GenerateRequest:  # fmt: skip
    tokens = np.array(prompt, dtype=np.int32)
    return GenerateRequest(str(name), tokens, seed, SamplingParams(max_tokens, **sampling), stream)


def run(engine: TransformersEngine, requests: Sequence[GenerateRequest]) -> dict[str, Completion]:
    engine.add(requests)
    done: dict[str, Completion] = {}
    while engine.pending:
        for completion in engine.step():
            assert completion.id not in done
            done[completion.id] = completion
    return done


@torch.no_grad()
def reference(
    model: transformers.PreTrainedModel, prompt: Sequence[int], answer: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Log-probabilities of the answer's tokens by one pass over everything, without a cache."""
    model.set_attn_implementation("eager")
    tokens = torch.tensor([*prompt, *answer.tolist()])[None]
    logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, -1).gather(-1, tokens[0, len(prompt) :, None])[:, 0].numpy()


def bits(completion: Completion) -> tuple:
    return completion.tokens.tobytes(), completion.logprobs.tobytes(), completion.stop_reason


def mixture(count: int, vocabulary: int, context: int, seed: int = 0) -> list[GenerateRequest]:
    """Requests of every kind: groups, short and long prompts, greedy, filtered, stopped."""
    generator = random.Random(seed)
    requests = []
    for index in range(count):
        lengths = [1, 2, 7, 63, 64, 65, 66, 140, 200, 300]
        length = lengths[index // 3 % len(lengths)]
        prompt = random.Random(index // 3).choices(range(vocabulary), k=length)
        requests.append(
            request(
                index,
                prompt,
                seed=index * 7919,
                max_tokens=min(generator.randint(1, 40), context - length),
                temperature=generator.choice([0.0, 0.6, 1.0, 1.4]),
                top_p=generator.choice([1.0, 0.9]),
                top_k=generator.choice([0, 10]),
                stop_token_ids=(3, 4),
            )
        )
    return requests


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_full_forward_pass(kind: str, temperature: float) -> None:
    model = tiny(kind)
    prompts = [(5,), (1, 2, 3), tuple(range(40)) * 2, (7, 8) * 75]
    requests = [request(index, prompt, index, 100, temperature=temperature) for index, prompt in enumerate(prompts)]
    done = run(TransformersEngine(model), requests)
    for index, prompt in enumerate(prompts):
        answer = done[str(index)]
        assert len(answer.tokens) == 100 and answer.stop_reason == "length"
        assert np.abs(answer.logprobs - reference(model, prompt, answer.tokens, temperature)).max() < 2e-5


def test_greedy_equals_the_most_probable_token_at_every_place() -> None:
    model = tiny()
    answer = run(TransformersEngine(model), [request(max_tokens=30, temperature=0.0)])["a"]
    model.set_attn_implementation("eager")
    tokens = [1, 2, 3]
    with torch.no_grad():
        for _ in range(30):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert answer.tokens.tolist() == tokens[3:]
    assert np.abs(answer.logprobs - reference(model, (1, 2, 3), answer.tokens)).max() < 2e-5


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"intermediate_size": 61}),  # odd: rows padded to 16 would end in the scalar rest of a loop
        ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 64}),
        ("qwen3", {"num_attention_heads": 8, "head_dim": 64}),
    ],
)
def test_an_answer_is_the_same_bits_in_any_company(kind: str, changes: dict) -> None:
    check_company(tiny(kind, **changes), mixture(36, VOCABULARY, 512))


def test_an_answer_of_a_trained_model_is_the_same_bits_in_any_company() -> None:
    check_company(load_causal_lm(str(stories()), dtype="float32", device="cpu"), mixture(30, 512, 512))


def check_company(model: transformers.PreTrainedModel, requests: list[GenerateRequest]) -> None:
    """Every request alone, all at once, and trickling in reversed order through few rows: the same bits."""
    alone = {each.id: bits(run(TransformersEngine(model), [each])[each.id]) for each in requests}
    together = run(TransformersEngine(model), requests)
    assert {name: bits(completion) for name, completion in together.items()} == alone
    generator, trickled = random.Random(1), {}
    engine = TransformersEngine(model, max_rows=17)
    rest = requests[::-1]
    while rest or engine.pending:
        count = generator.randint(0, 6)
        engine.add(rest[:count])
        rest = rest[count:]
        trickled |= {completion.id: bits(completion) for completion in engine.step()}
    assert trickled == alone


def test_seeds_determine_answers_and_distinguish_them() -> None:
    model = tiny()
    requests = [request(seed, seed=seed, max_tokens=12) for seed in range(8)]
    first, second = (run(TransformersEngine(model), requests) for _ in range(2))
    assert {name: bits(answer) for name, answer in first.items()} == {k: bits(v) for k, v in second.items()}
    assert len({answer.tokens.tobytes() for answer in first.values()}) > 4
    assert all((answer.versions == 0).all() for answer in first.values())


def test_negative_and_huge_seeds_are_taken() -> None:
    requests = [request("n", seed=-1), request("p", seed=2**64 - 1), request("h", seed=2**70)]
    done = run(TransformersEngine(tiny()), requests)
    assert bits(done["n"]) == bits(done["p"])


def test_equal_prompts_share_one_prefill() -> None:
    engine = TransformersEngine(tiny())
    run(engine, [request(index, [1] * 20, index) for index in range(5)] + [request("b", [2] * 11)])
    stats = engine.stats()
    assert stats["prefill_tokens"] == 19 + 10  # all but the last token, which the first step feeds
    assert stats["sampled_tokens"] == 6 * 8
    assert stats["steps"] == 8
    assert 0 < stats["model_s"] < stats["busy_s"]


def test_more_requests_than_rows_wait_in_order() -> None:
    engine = TransformersEngine(tiny(), max_rows=2)
    engine.add([request(index, seed=index, max_tokens=3) for index in range(5)])
    finished = []
    while engine.pending:
        finished.append([completion.id for completion in engine.step()])
    assert finished == [[], [], ["0", "1"], [], [], ["2", "3"], [], [], ["4"]]


def test_stop_token_ends_the_answer_and_belongs_to_it() -> None:
    model = tiny()
    free = run(TransformersEngine(model), [request(max_tokens=30)])["a"].tokens.tolist()
    stop, never = free[10], next(token for token in range(VOCABULARY) if token not in free)
    answer = run(TransformersEngine(model), [request(max_tokens=30, stop_token_ids=(never, stop))])["a"]
    assert answer.stop_reason == "stop"
    assert answer.tokens.tolist() == free[: free.index(stop) + 1]
    unstopped = run(TransformersEngine(model), [request(max_tokens=30, stop_token_ids=(never,))])["a"]
    assert unstopped.tokens.tolist() == free and unstopped.stop_reason == "length"


def test_abort_returns_what_there_is() -> None:
    engine = TransformersEngine(tiny(), max_rows=2)
    requests = [request(index, seed=index, max_tokens=10) for index in range(3)]
    whole = run(TransformersEngine(tiny()), requests)
    engine.add(requests)
    for _ in range(4):
        assert engine.step() == []
    engine.abort(["0", "2", "never seen"])
    assert engine.pending == 3
    aborted = {completion.id: completion for completion in engine.step()}
    assert {name: completion.stop_reason for name, completion in aborted.items()} == {"0": "abort", "2": "abort"}
    assert aborted["0"].tokens.tolist() == whole["0"].tokens[:4].tolist()
    assert aborted["0"].logprobs.tolist() == whole["0"].logprobs[:4].tolist()
    assert len(aborted["2"].tokens) == 0
    assert bits(run(engine, [])["1"]) == bits(whole["1"])


def test_streamed_parts_add_up_to_the_answer() -> None:
    model = tiny()
    whole = run(TransformersEngine(model), [request(max_tokens=5)])["a"]
    engine = TransformersEngine(model)
    engine.add([request(max_tokens=5, stream=True), request("b", max_tokens=5)])
    parts = []
    while engine.pending:
        parts += [completion for completion in engine.step() if completion.id == "a"]
    assert [part.stop_reason for part in parts] == [None] * 4 + ["length"]
    assert np.concatenate([part.tokens for part in parts]).tolist() == whole.tokens.tolist()
    assert np.concatenate([part.logprobs for part in parts]).tolist() == whole.logprobs.tolist()
    assert sum(len(part.versions) for part in parts) == 5


def test_prompt_that_fills_the_context_is_an_error_and_never_cut() -> None:
    engine = TransformersEngine(tiny(), max_context=10)
    done = run(engine, [request("fits", [1] * 9), request("exact", [1] * 10), request("long", [1] * 30)])
    assert done["fits"].stop_reason == "length" and len(done["fits"].tokens) == 1
    assert done["exact"].error == "prompt of 10 tokens does not fit the context of 10"
    assert done["long"].stop_reason == "error" and len(done["long"].tokens) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [VOCABULARY]}, "vocabulary"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "out of range"),
        ({"top_p": 0.0}, "out of range"),
    ],
)
def test_request_that_cannot_be_served_comes_back_as_an_error(changes: dict, message: str) -> None:
    done = run(TransformersEngine(tiny()), [request("bad", **changes), request("good")])
    assert done["bad"].stop_reason == "error" and message in done["bad"].error
    assert len(done["good"].tokens) == 8


def test_id_in_flight_is_refused_until_it_ends() -> None:
    engine = TransformersEngine(tiny())
    engine.add([request()])
    with pytest.raises(EngineError, match="in flight"):
        engine.add([request()])
    run(engine, [])
    assert len(run(engine, [request()])) == 1


def test_nan_of_one_row_stays_there() -> None:
    model = tiny()
    others = [request("short", [5], 9, 12), *(request(index, [1, 2, index], index, 12) for index in range(1, 6))]
    expected = {name: bits(answer) for name, answer in run(TransformersEngine(model), others).items()}
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = math.nan  # 0: what a batch is most likely to be padded with
    engine = TransformersEngine(model)
    bad = [request("bad", [0, 1, 2], max_tokens=20), request("worse", [1, 0], max_tokens=20)]
    for requests in (bad, others, bad + others, others):  # others take the rows that the bad ones have left
        done = run(engine, requests)
        for name in {"bad", "worse"} & set(done):
            assert done[name].stop_reason == "error" and "NaN" in done[name].error and len(done[name].tokens) == 0
        # One that samples the broken token itself ends there; the others do not notice.
        sound = {name for name in done if name in expected and 0 not in done[name].tokens}
        assert requests is bad or {"short", "1", "2"} <= sound
        assert {name: bits(done[name]) for name in sound} == {name: expected[name] for name in sound}


@pytest.mark.parametrize("tied", [False, True])
def test_load_weights_makes_it_the_other_model(tied: bool) -> None:
    model, other = (tiny(seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    engine = TransformersEngine(model)
    run(engine, [request()])
    engine.load_weights(dict(other.named_parameters()), version=3)
    answer = run(engine, [request(max_tokens=20)])["a"]
    assert engine.version == 3 and answer.versions.tolist() == [3] * 20
    assert np.abs(answer.logprobs - reference(other, (1, 2, 3), answer.tokens)).max() < 1e-5


def test_load_weights_takes_a_tied_head_if_it_is_equal() -> None:
    engine = TransformersEngine(tiny(tie_word_embeddings=True))
    weights = {name: weight.clone() for name, weight in tiny(seed=1, tie_word_embeddings=True).state_dict().items()}
    assert "lm_head.weight" in weights
    engine.load_weights(weights, version=1)
    weights["lm_head.weight"][0, 0] += 1
    with pytest.raises(WeightSyncError, match="tied"):
        engine.load_weights(weights, version=2)
    assert engine.version == 1


def test_load_weights_converts_the_dtype() -> None:
    engine = TransformersEngine(tiny())
    weights = {name: weight.bfloat16() for name, weight in tiny(seed=1).named_parameters()}
    engine.load_weights(weights, version=1)
    assert torch.equal(engine.model.lm_head.weight, weights["lm_head.weight"].float())


@pytest.mark.parametrize("damage", ["unknown", "missing", "of another shape"])
def test_weights_that_do_not_match_leave_the_old_ones(damage: str) -> None:
    engine = TransformersEngine(tiny())
    before = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
    weights = dict(tiny(seed=1).named_parameters())
    if damage == "unknown":
        weights |= {f"model.extra{index}": torch.zeros(1) for index in range(7)}
    elif damage == "missing":
        del weights["model.norm.weight"]
    else:
        weights["model.norm.weight"] = torch.zeros(33)
    with pytest.raises(WeightSyncError, match=damage) as caught:
        engine.load_weights(weights, version=1)
    named = "model.extra4 and 2 more" if damage == "unknown" else "model.norm.weight"
    assert named in str(caught.value)
    assert engine.version == 0
    assert all(torch.equal(weight, before[name]) for name, weight in engine.model.state_dict().items())


def test_requests_in_flight_go_on_under_new_weights() -> None:
    model, other = tiny(), tiny(seed=1)
    before = run(TransformersEngine(tiny()), [request(max_tokens=9)])["a"]
    engine = TransformersEngine(model)
    engine.add([request(max_tokens=9)])
    for _ in range(4):
        engine.step()
    engine.load_weights(dict(other.named_parameters()), version=1)
    after = run(engine, [])["a"]
    assert after.versions.tolist() == [0] * 4 + [1] * 5
    assert after.tokens[:4].tolist() == before.tokens[:4].tolist()
    assert after.logprobs[4:].tolist() != before.logprobs[4:].tolist()


@pytest.mark.parametrize("cut", [1, 4, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_an_answer_interrupted_in_the_middle_goes_on_elsewhere_as_if_nothing_had_happened(
    cut: int, temperature: float
) -> None:
    asked = [
        request(n, prompt=[1 + n, 2, 3] * (n + 1), seed=70 + n, max_tokens=10, temperature=temperature, top_p=0.9)
        for n in range(5)
    ]
    alone = run(TransformersEngine(tiny()), asked)
    first, second = TransformersEngine(tiny()), TransformersEngine(tiny())
    first.add(asked)
    for _ in range(cut):
        assert first.step() == []
    first.abort([each.id for each in asked])
    parts = {part.id: part for part in first.step()}
    rest = [each.after(parts[each.id]) for each in asked]
    # In other company, too.
    done = run(second, [*rest, request("other", seed=5, max_tokens=20)])
    for each, left in zip(asked, rest):
        assert (len(parts[each.id].tokens), left.drawn, left.sampling.max_tokens) == (cut, cut, 10 - cut)
        whole, expected = parts[each.id].then(done[each.id]), alone[each.id]
        assert len(whole.tokens) == 10 and whole.stop_reason == "length"
        assert whole.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(whole.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_an_answer_interrupted_again_and_again_keeps_to_its_budget_and_its_stop_token() -> None:
    whole = run(TransformersEngine(tiny()), [request(seed=3, max_tokens=30)])["a"]
    stop = int(whole.tokens[17])
    stops = {"max_tokens": 30, "stop_token_ids": (stop,)}
    expected = run(TransformersEngine(tiny()), [request(seed=3, **stops)])["a"]
    left, answer = request(seed=3, **stops), None
    for steps in (1, 2, 3, 2, 100):
        engine = TransformersEngine(tiny())
        engine.add([left])
        parts: list[Completion] = []
        for _ in range(steps):
            parts += engine.step()
        engine.abort(["a"])
        parts += engine.step()
        answer = parts[0] if answer is None else answer.then(parts[0])
        if answer.stop_reason != "abort":
            break
        left = left.after(parts[0])
    assert (answer.stop_reason, answer.tokens.tolist()) == ("stop", expected.tokens.tolist())
    np.testing.assert_allclose(answer.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_a_part_sampled_by_other_weights_keeps_its_version() -> None:
    first, second = TransformersEngine(tiny()), TransformersEngine(tiny(), version=4)
    first.add([request(max_tokens=6)])
    first.step()
    first.step()
    first.abort(["a"])
    [part] = first.step()
    done = run(second, [request(max_tokens=6).after(part)])["a"]
    assert part.then(done).versions.tolist() == [0, 0, 4, 4, 4, 4]


def test_rows_whose_cache_was_dropped_are_prefilled_anew() -> None:
    asked = [request(index, [1 + index, 2, 3], seed=index, max_tokens=12, stream=index == 1) for index in range(4)]
    alone = run(TransformersEngine(tiny()), [replace(each, stream=False) for each in asked])
    engine = TransformersEngine(tiny(), max_rows=3)
    engine.add(asked)
    parts: list[Completion] = []
    for _ in range(5):
        parts += engine.step()
    engine._drop_cache()  # what `offload` does on a GPU
    engine.abort(["0"])
    while engine.pending:
        parts += engine.step()
    for name, length in (("0", 5), ("1", 12), ("2", 12), ("3", 12)):
        tokens = np.concatenate([part.tokens for part in parts if part.id == name])
        logprobs = np.concatenate([part.logprobs for part in parts if part.id == name])
        assert tokens.tolist() == alone[name].tokens[:length].tolist()
        np.testing.assert_allclose(logprobs, alone[name].logprobs[:length], rtol=0, atol=1e-5)


def test_models_with_other_state_are_refused() -> None:
    window = tiny("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(EngineError, match=r"qwen2.*window of 16"):
        TransformersEngine(window)
    TransformersEngine(window, max_context=16)
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1}
    for config in (transformers.MambaConfig(**sizes), transformers.BloomConfig(**sizes, n_head=2)):
        with pytest.raises(EngineError, match=config.model_type):
            TransformersEngine(transformers.AutoModelForCausalLM.from_config(config), max_context=16)


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(EngineError, match="513"):
        TransformersEngine(tiny(), max_context=513)
    with pytest.raises(EngineError, match="max_context 1 leaves no room"):
        TransformersEngine(tiny(), max_context=1)


def test_a_model_of_another_family_runs() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    answer = run(TransformersEngine(model), [request(max_tokens=20)])["a"]
    assert np.abs(answer.logprobs - reference(model, (1, 2, 3), answer.tokens)).max() < 1e-5


def test_trained_model_tells_a_story() -> None:
    folder = str(stories())
    model, tokenizer = load_causal_lm(folder, dtype="auto", device="cpu"), load_tokenizer(folder)
    prompt = tokenizer("Once upon a time")["input_ids"]
    answer = run(TransformersEngine(model), [request(prompt=prompt, max_tokens=40, temperature=0.0)])["a"]
    assert "there was a" in tokenizer.decode(answer.tokens)
    assert np.abs(answer.logprobs - reference(model, prompt, answer.tokens)).max() < 2e-5
