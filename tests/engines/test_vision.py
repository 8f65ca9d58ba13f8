"""Vision-language models in both engines, against the whole model of transformers, one sequence at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.config.schema import OptimizerConfig, ParallelConfig, PolicyConfig
from rollcli.data.batch import Batch
from rollcli.data.images import Images
from rollcli.engines import naming, vision
from rollcli.engines.base import Completion, GenerateRequest, SamplingParams
from rollcli.engines.fsdp import FsdpEngine
from rollcli.engines.objectives import LogProbs
from rollcli.engines.transformers import TransformersEngine
from rollcli.errors import EngineError
from tests.engines import vision_model as small

pytestmark = pytest.mark.usefixtures("one_rank")
FORMAT = small.chat_format()
STOPS = FORMAT.forbidden
GRPO = Grpo(kl=KlPenalty(coefficient=0.0))
IMAGE = STOPS[0]


def chat(*sizes: tuple[int, int], colour: str = "red") -> list[dict]:
    pictures = [small.picture(colour, *size, seed=number) for number, size in enumerate(sizes)]
    return [{"role": "user", "content": [*({"type": "image", "image": each} for each in pictures),
                                         {"type": "text", "text": "which colour?"}]}]  # fmt: skip


CHATS = [
    chat((16, 24)), chat((24, 16)), chat((16, 24), colour="blue"), chat((32, 16), (8, 8)), chat(),
    [*chat((16, 16)), {"role": "assistant", "content": "red"}, *chat((8, 24), colour="blue")],
]  # fmt: skip


def requests(tokens: int = 12) -> list[GenerateRequest]:
    made = []
    for number, messages in enumerate(CHATS * 2):
        images = FORMAT.images(messages)
        prompt = FORMAT.prompt(messages, images)
        sampling = SamplingParams(tokens, stop_token_ids=STOPS)
        made.append(GenerateRequest(str(number), prompt, number, sampling, images=images))
    return made


def answers(engine: TransformersEngine, asked: list[GenerateRequest]) -> dict[str, Completion]:
    engine.add(asked)
    done = {}
    while engine.pending:
        done |= {completion.id: completion for completion in engine.step()}
    return done


@torch.no_grad()
def reference(model: transformers.PreTrainedModel, tokens: np.ndarray, images: Images | None) -> np.ndarray:
    """Log-probability of each token but the first by the model's own forward pass, its own positions."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    given = {} if images is None else {name: torch.from_numpy(values) for name, values in images.items()}
    kinds = {"mm_token_type_ids": (ids == IMAGE).int()} if images is not None else {}
    logits = model(input_ids=ids, use_cache=False, **given, **kinds).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()


def train_engine(model: transformers.PreTrainedModel, **changes: object) -> FsdpEngine:
    settings = {"packing": True, "micro_batch_tokens": 100} | changes
    return FsdpEngine(model, PolicyConfig(optimizer=OptimizerConfig(learning_rate=1e-2), **settings))


def batch_of(asked: list[GenerateRequest], done: dict[str, Completion]) -> Batch:
    sequences, images = [], []
    for request in asked:
        tokens = np.concatenate([request.prompt, done[request.id].tokens])
        sequences.append((tokens, np.arange(len(tokens)) >= len(request.prompt)))
        images.append(request.images)
    return Batch.from_sequences(sequences, images)


@pytest.mark.parametrize("kind", small.KINDS)
def test_sampled_trained_and_whole_model_agree(kind: str) -> None:
    asked = requests()
    done = answers(TransformersEngine(small.tiny(kind)), asked)
    assert all(each.error is None for each in done.values())
    batch, whole = batch_of(asked, done), small.tiny(kind)
    columns = [train_engine(small.tiny(kind), packing=packing).forward(batch, LogProbs(1.0)) for packing in (1, 0)]
    for number, request in enumerate(asked):
        part = slice(batch.offsets[number], batch.offsets[number + 1])
        sampled, length = done[request.id], len(request.prompt)
        tokens = batch.tokens["ids"][part]
        # A sampled placeholder is the last token: the model may predict it, and is never shown it.
        shown = tokens.copy()
        if tokens[-1] in STOPS:
            shown[-1] = 0
        expected = reference(whole, shown, request.images)[length - 1 :]
        known = len(expected) - (tokens[-1] in STOPS)
        assert np.abs(expected - sampled.logprobs)[:known].max(initial=0) < 2e-5
        for column in columns:
            assert np.abs(column[part][length:] - sampled.logprobs).max() < 2e-5


def test_answers_depend_on_the_image_and_not_on_company() -> None:
    asked = requests()
    engine = TransformersEngine(small.tiny())
    together = answers(engine, asked)
    assert engine.stats()["prefill_tokens"] == sum(len(request.prompt) - 1 for request in asked[: len(CHATS)])
    for request in asked:
        alone = answers(TransformersEngine(small.tiny()), [request])[request.id]
        assert alone.tokens.tobytes() == together[request.id].tokens.tobytes()
        assert alone.logprobs.tobytes() == together[request.id].logprobs.tobytes()
    first, other = asked[0], asked[2]
    assert np.array_equal(first.prompt, other.prompt)
    red, blue = (reference(small.tiny(), each.prompt, each.images)[-3:] for each in (first, other))
    assert np.abs(red - blue).max() > 1e-3


def test_an_interrupted_answer_goes_on() -> None:
    request = next(
        each for each in requests(20) if len(answers(TransformersEngine(small.tiny()), [each])[each.id].tokens) > 5
    )
    whole = answers(TransformersEngine(small.tiny()), [request])[request.id]
    engine = TransformersEngine(small.tiny())
    engine.add([request])
    for _ in range(3):
        engine.step()
    engine.abort([request.id])
    (part,) = engine.step()
    rest = answers(TransformersEngine(small.tiny()), [request.after(part)])[request.id]
    assert np.array_equal(part.then(rest).tokens, whole.tokens)
    assert np.abs(part.then(rest).logprobs - whole.logprobs).max() < 2e-5


def test_what_does_not_belong_together_is_refused() -> None:
    request = requests()[0]
    images = request.images
    engine = TransformersEngine(small.tiny())

    def said(prompt: np.ndarray, given: Images | None) -> str:
        asked = GenerateRequest("a", prompt.astype(np.int32), 0, SamplingParams(2), images=given)
        return answers(engine, [asked])["a"].error or ""

    assert "6 image tokens, and its images make 0" in said(request.prompt, None)
    assert "7 image tokens, and its images make 6" in said(np.insert(request.prompt, 3, IMAGE), images)
    assert "ends in an image" in said(request.prompt[:8], images)
    batch = Batch.from_sequences([(request.prompt, np.arange(len(request.prompt)) > 10)])
    with pytest.raises(EngineError, match="which its images do not fit"):
        train_engine(small.tiny()).forward(batch, LogProbs(1.0))


def weighed(batch: Batch) -> Batch:
    trained = int(batch.tokens["loss_mask"].sum())
    batch.tokens["advantages"] = np.where(batch.rows % 2, 1.0, -1.0)
    batch.tokens["loss_weights"] = np.full(int(batch.offsets[-1]), 1 / trained)
    return batch


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_a_step_trains_both_parts_and_the_checkpoint_loads(tmp_path: Path, kind: str) -> None:
    model = small.tiny(kind)
    before = {name: tensor.clone() for name, tensor in naming.to_hub(model, naming.tensors_of(model)).items()}
    asked = requests()
    rollout = TransformersEngine(small.tiny(kind))
    batch = weighed(batch_of(asked, answers(rollout, asked)))
    engine = train_engine(model)
    metrics, _ = engine.update(batch, LogProbs(1.0, GRPO), 1e-2)
    assert metrics["grad_norm"] > 0
    after = engine.named_weights()
    assert after.keys() == before.keys() and rollout.weight_shapes().keys() == after.keys()
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert not any("visual" not in name for name in same)
    assert sum("visual" in name for name in same) <= 1  # a bias of keys moves all scores alike
    rollout.load_weights(after, 1)
    moved = answers(rollout, asked)
    column = engine.forward(batch_of(asked, moved), LogProbs(1.0))
    sampled = np.concatenate([moved[request.id].logprobs for request in asked])
    assert np.abs(column[batch_of(asked, moved).tokens["loss_mask"]] - sampled).max() < 1e-4
    engine.save(tmp_path)
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = asked[0].prompt
    engine.model.eval()
    assert (
        np.abs(reference(loaded, tokens, asked[0].images) - reference(engine.model, tokens, asked[0].images)).max() == 0
    )
    again = train_engine(small.tiny(kind, seed=1))
    again.load(tmp_path)
    assert np.array_equal(again.forward(batch, LogProbs(1.0)), engine.forward(batch, LogProbs(1.0)))


def test_a_batch_without_an_image_trains() -> None:
    asked = [request for request in requests() if request.images is None]
    batch = weighed(batch_of(asked, answers(TransformersEngine(small.tiny()), asked)))
    engine = train_engine(small.tiny())
    metrics, column = engine.update(batch, LogProbs(1.0, GRPO), 1e-2)
    whole = small.tiny()
    for number, request in enumerate(asked):
        part = slice(batch.offsets[number], batch.offsets[number + 1])
        tokens = batch.tokens["ids"][part]
        if tokens[-1] in STOPS:
            continue
        assert (
            np.abs(
                reference(whole, tokens, None)[len(request.prompt) - 1 :] - column[part][len(request.prompt) :]
            ).max()
            < 2e-5
        )
    assert metrics["grad_norm"] > 0 and not metrics["skipped_updates"]


def test_two_ranks_of_which_one_sees_an_image(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    asked = requests()
    batch = weighed(batch_of(asked, answers(TransformersEngine(small.tiny()), asked)))
    engine = train_engine(small.tiny())
    engine.update(batch, LogProbs(1.0, GRPO), 1e-2)
    together = torch.load(tmp_path / "weights.pt")
    for name, weight in engine.named_weights().items():
        # AdamW's first step has the sign of a gradient, which rounding decides where it is nothing.
        assert (weight - together[name]).abs().median() < 1e-5, name


def one_of_two(folder: Path, rank: int) -> None:
    """What a rank does: the first has all images, the second none."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    asked = requests()
    batch = weighed(batch_of(asked, answers(TransformersEngine(small.tiny()), asked)))
    mine = [number for number, request in enumerate(asked) if (request.images is None) == bool(rank)]
    engine = train_engine(small.tiny())
    engine.update(batch.select(np.array(mine)), LogProbs(1.0, GRPO), 1e-2)
    weights = engine.named_weights()
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    torch.distributed.destroy_process_group()


def test_other_families_and_other_engines_are_refused() -> None:
    config = transformers.AutoConfig.for_model("llava")
    with pytest.raises(EngineError, match="`llava` model sees images in a way that is not supported"):
        vision.check_family(config)
    with pytest.raises(EngineError, match="`vllm` does not run vision-language models"):
        vision.check_none(small.tiny().config, "vllm")
    text = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.AutoModelForCausalLM.from_config(text)
    vision.check_none(text, "vllm")
    assert vision.of(model) is None
    asked = GenerateRequest("a", np.array([1, 2], np.int32), 0, SamplingParams(1), images=requests()[0].images)
    assert answers(TransformersEngine(model), [asked])["a"].error == "the request has images, and the model sees none"
    with pytest.raises(EngineError, match="is not split here"):
        train_engine(small.tiny(), parallel=ParallelConfig(tensor=2))


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]), int(sys.argv[2]))
