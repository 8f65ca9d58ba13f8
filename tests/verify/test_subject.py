"""rollcli's answers: all right, through the code that trains, so that a fault in it shows as the property it breaks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from rollcli.algorithms import aggregation, kl, policy_gradient, ppo
from rollcli.engines import fsdp, objectives
from rollcli.engines.transformers import TransformersEngine
from rollcli.verify import subject, suite
from rollcli.verify.properties import PROPERTIES


def failing(only: str | None = None) -> set[str]:
    """Returns the names of what fails."""
    return {each.property.name for each in suite.run(suite.select(only), subject, True) if each.status != "ok"}


@pytest.mark.parametrize("each", PROPERTIES, ids=lambda each: each.name)
def test_holds(each):
    (result,) = suite.run([each], subject, True)
    assert result.status == "ok", result


def test_without_a_model_nothing_imports_torch():
    code = (
        "import sys\nfrom rollcli.verify import subject, suite\n"
        "for text in ('aggregation', 'advantages', 'penalized', 'needed', 'overlong', 'accepted', 'times', 'cosine'):\n"
        "    assert all(r.status == 'ok' for r in suite.run(suite.select(text), subject, True)), text\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_mean_over_the_wrong_count(monkeypatch):
    def over_all(batch, divisor=None):
        mask = batch.tokens["loss_mask"]
        return mask / len(mask)

    monkeypatch.setitem(aggregation.MODES, "token-mean", over_all)
    assert {"token-mean counts tokens, not answers", "a cut-off answer left out counts nowhere"} <= failing("aggregate")


def test_a_mean_of_means(monkeypatch):
    monkeypatch.setitem(aggregation.MODES, "token-mean", aggregation.seq_mean_token_mean)
    assert {"token-mean counts tokens, not answers", "two micro-batches add up to one batch"} <= failing("aggregate")


def test_an_estimate_that_bootstraps_through_pads(monkeypatch):
    def through_pads(batch, rewards, values, gamma, lam):
        result = np.zeros(len(rewards))
        for row in range(len(batch)):
            following = advantage = 0.0
            for place in reversed(range(batch.offsets[row], batch.offsets[row + 1])):
                advantage = rewards[place] + gamma * following - values[place] + gamma * lam * advantage
                result[place], following = advantage, values[place]
        return result

    monkeypatch.setattr(ppo, "generalized_advantages", through_pads)
    assert failing("gae") == {
        "the estimate does not bootstrap through pads",
        "NaN values on prompt and pads change nothing",
        "time counts actions, not what is observed",
    }


def test_a_divergence_without_gradient(monkeypatch):
    monkeypatch.setitem(kl.ESTIMATORS, "k3", lambda difference: kl.k3(difference.detach()))
    assert {"KL estimator k3: gradient", "the coefficient scales the penalty once"} <= failing("KL")


def test_a_trainer_that_ignores_the_temperature(monkeypatch):
    def column(self, tokens, outputs):
        return outputs.log_softmax(-1).gather(-1, tokens.ids[:, None])[:, 0]

    monkeypatch.setattr(objectives.LogProbs, "column", column)
    wrong = failing("log-prob")
    assert {"temperature 0.5 divides the logits", "on-policy ratios are 1 at temperature 0.7"} <= wrong
    assert "temperature 1 divides the logits" not in wrong


def test_an_update_that_ignores_the_temperature(monkeypatch):
    plain = objectives.LogProbs.loss
    monkeypatch.setattr(objectives.LogProbs, "loss", lambda self, t, o: plain(self, t, o * self.temperature))
    assert failing("updates") == {"update and forward pass agree at 0.7"}


def test_a_sum_in_place_of_a_mean(monkeypatch):
    monkeypatch.setitem(aggregation.MODES, "token-mean", lambda batch, divisor=None: batch.tokens["loss_mask"] * 1.0)
    assert "every sample twice changes no gradient" in failing("update_gradient")


def test_log_probabilities_in_half_precision(monkeypatch):
    whole = objectives.LogProbs.column
    monkeypatch.setattr(objectives.LogProbs, "column", lambda self, t, o: whole(self, t, o.bfloat16().float()))
    assert "log-probabilities are float32" in failing("token_logprobs")


def test_deviation_in_single_precision(monkeypatch):
    def naive(rewards, groups, scale="group"):
        values = torch.tensor(rewards, dtype=torch.float32)
        return ((values - values.mean()) / (values.std() + 1e-9)).numpy()

    monkeypatch.setattr("rollcli.algorithms.policy_gradient.group_normalized", naive)
    assert {f"eight equal rewards of {value} give exactly 0" for value in (0.1, 0.7)} <= failing("group_advantages")


def test_a_sync_that_forgets(monkeypatch):
    monkeypatch.setattr(TransformersEngine, "load_weights", lambda self, weights, version: None)
    assert failing("ratios") == {"after update and sync ratios are 1 again"}


def test_loss_divided_by_each_micro_batch(monkeypatch):
    plain = fsdp.FsdpEngine._columns

    def columns(self, batch, picked):
        if "loss_weights" in batch.tokens and len(picked):
            batch.tokens["loss_weights"][picked] = 1 / len(picked)
        return plain(self, batch, picked)

    monkeypatch.setattr(fsdp.FsdpEngine, "_columns", columns)
    assert "micro-batches change no gradient" in failing("update_gradient")


def test_masked_values_multiplied_in(monkeypatch):
    monkeypatch.setattr(subject, "aggregate", lambda losses, mask, mode, **_: float(
        (np.array(losses) * np.array(mask)).sum() / np.array(mask).sum()))  # fmt: skip
    assert "NaN on a masked token changes nothing" in failing("NaN on a masked")


def test_a_clip_that_keeps_the_gradient(monkeypatch):
    monkeypatch.setattr(
        policy_gradient.surrogates, "dual_clipped", lambda ratio, advantages, *_: (-ratio * advantages, ratio * 0)
    )
    assert failing("policy_loss") == {"gains are clipped, losses are not", "a clipped token has no gradient"}


def test_an_engine_that_does_not_stop(monkeypatch):
    monkeypatch.setattr("rollcli.verify.model.SamplingParams", _endless)
    assert "an answer ends with its first end token" in failing("answer_mask")


def _endless(max_tokens, temperature=1.0, stop_token_ids=()):
    from rollcli.engines.base import SamplingParams

    return SamplingParams(max_tokens, temperature)


def test_no_process_group_is_left_behind():
    subject.first_update_kl([[8, 20, 9]], [[0, 1, 1]], [1.0], 1.0, 64)
    assert not torch.distributed.is_initialized()
