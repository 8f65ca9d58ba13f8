"""Every planted fault is found, and the evidence shows it: the gap is gone once the fault is assumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollcli.doctor import causes
from rollcli.doctor.causes import Diagnosis, Trial, diagnose, first_difference, processed
from rollcli.doctor.gap import Gap


def found_in(found) -> Diagnosis:
    assert not found.explained
    return diagnose(found)


def assert_closed(found, diagnosis: Diagnosis, cause: str) -> None:
    assert diagnosis.cause is not None and diagnosis.whole
    assert diagnosis.cause.cause == cause, diagnosis.trials
    assert diagnosis.cause.gap.mean < 1e-4 < found.gap.mean


def test_temperature_is_ignored(measured):
    found = measured("rollout.sampling.temperature=0.7", engine="IgnoresTemperature")
    diagnosis = found_in(found)
    assert_closed(found, diagnosis, "temperature")
    assert diagnosis.cause.assumed == "rescored at temperature 1"
    assert "at temperature 1 (raw log-probabilities), and was asked for 0.7" in diagnosis.cause.finding
    assert "rollout.sampling.temperature=1" in diagnosis.cause.advice


def test_logprobs_after_top_k(measured):
    found = measured("rollout.sampling.top_k=3", "rollout.sampling.temperature=1.5", engine="Renormalizes")
    diagnosis = found_in(found)
    assert_closed(found, diagnosis, "processed log-probabilities")
    assert diagnosis.cause.assumed == "rescored at temperature 1.5, renormalized over top-k 3"


def test_engine_in_bfloat16(measured):
    found = measured(engine="Half", samples=16)
    diagnosis = found_in(found)
    assert diagnosis.cause.cause == "precision" and diagnosis.whole, diagnosis.trials
    assert diagnosis.cause.assumed.startswith("rescored in bfloat16, which moves the trainer itself by mean 0.0")
    assert "model.dtype=bfloat16" in diagnosis.cause.advice


def test_stale_weights_name_the_tensor(measured):
    found = measured(engine="Stale")
    diagnosis = found_in(found)
    assert_closed(found, diagnosis, "weights")
    assert "the first that differs is `model.layers.1.mlp.up_proj.weight`" in diagnosis.cause.finding


def test_weights_that_cannot_be_read(measured):
    found = measured(engine="Corrupts")
    diagnosis = found_in(found)
    assert_closed(found, diagnosis, "weights")
    assert diagnosis.cause.finding.startswith("the engine is right as loaded")


def test_a_token_before_the_prompt(measured):
    found = measured(engine="ExtraToken")
    diagnosis = found_in(found)
    assert_closed(found, diagnosis, "prompt ids")
    assert diagnosis.cause.assumed == f"`{found.bench.chat.raw_text(np.array([0]))}` put before every prompt"


def test_logprobs_of_the_token_before(measured):
    found = measured(engine="Shifted")
    diagnosis = found_in(found)
    assert_closed(found, diagnosis, "order")
    assert "shifted by one: each is that of the previous token" in diagnosis.cause.finding
    assert len(diagnosis.trials) == 1, "the cheapest suspicion comes first, and the search ends with it"


def test_logprobs_of_other_answers(measured):
    found = measured("rollout.sampling.temperature=1.5", engine="Mixed", samples=16)
    diagnosis = found_in(found)
    assert_closed(found, diagnosis, "order")
    assert "belong to other answers" in diagnosis.cause.finding


def test_wrong_for_several_at_once(measured):
    found = measured("rollout.sampling.temperature=1.5", engine="Crowded")
    diagnosis = found_in(found)
    assert_closed(found, diagnosis, "batching")


def test_nothing_explains_it(measured):
    told: list[str] = []
    found = measured("rollout.sampling.temperature=1.5", engine="Strange")
    diagnosis = diagnose(found, told.append)
    assert diagnosis.cause is None and not diagnosis.whole
    assert told == [f"testing: {name}" for name in causes.CAUSES]
    assert {trial.cause for trial in diagnosis.trials} >= {"temperature", "prompt ids", "weights", "packing"}


def test_nothing_explains_it_in_bfloat16(measured):
    found = measured("model.dtype=bfloat16", "rollout.sampling.temperature=1.5", engine="Strange")
    diagnosis = found_in(found)
    assert diagnosis.cause is None
    assert diagnosis.trials[-1].assumed == "both engines in float32"


def gap(mean: float) -> Gap:
    return Gap(mean, 2 * mean, 0.0, 1.0, 10)


def test_part_of_a_gap_is_likely_and_not_whole(measured, monkeypatch):
    found = measured(engine="Shifted")
    trial = Trial("temperature", "half of it", gap(found.gap.mean / 10), "found", "do")
    worse = Trial("weights", "none of it", gap(float("nan")), "found", "do")
    monkeypatch.setattr(causes, "CAUSES", {"a": lambda found: iter([worse, trial]), "b": lambda found: iter([])})
    diagnosis = diagnose(found)
    assert diagnosis.cause is trial and not diagnosis.whole and diagnosis.trials == [trial]


def test_processed():
    logprobs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    token = torch.tensor([1])
    assert processed(logprobs, token, 1.0, 0, 1.0).exp() == pytest.approx(0.3)
    assert processed(logprobs, token, 0.5, 0, 1.0).exp() == pytest.approx(0.09 / 0.38)
    assert processed(logprobs, token, 1.0, 2, 1.0).exp() == pytest.approx(0.3 / 0.8)
    assert processed(logprobs, token, 1.0, 0, 0.6).exp() == pytest.approx(0.3 / 0.8)
    assert processed(logprobs, torch.tensor([2]), 1.0, 2, 1.0).item() == -torch.inf
    assert processed(logprobs, torch.tensor([0]), 1.0, 0, 0.1).item() == 0.0


def test_first_difference():
    ours = {"a": torch.tensor([1.0, 1 / 3]), "b": torch.tensor([1.0]), "c": torch.zeros(2)}
    rounded = {name: tensor.bfloat16() for name, tensor in ours.items()}
    assert first_difference(ours, rounded) is None
    assert first_difference(ours, {**rounded, "b": torch.tensor([1.5])}) == ("b", 0.5)
    assert first_difference(ours, {"c": torch.zeros(3)}) == ("c", float("inf"))
    assert first_difference(ours, {"buffer": torch.ones(1)}) is None
