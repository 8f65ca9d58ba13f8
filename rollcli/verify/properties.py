"""What is right, as plain data: inputs, and the one value that follows from them.

A property names a call, which a subject offers as a function of that name (`subject` says what each one gives). Rows
may be of different lengths; a mask is 1 on trained tokens; what stands where it is 0 may be anything, NaN included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

NAN = math.nan


@dataclass(frozen=True)
class SameAs:
    """The right value is what the subject itself gives to these inputs in place of the property's own."""

    inputs: dict[str, Any]


@dataclass(frozen=True)
class Property:
    """One statement about a call, true of every right implementation.

    Attributes:
        section: what the property belongs to.
        name: what it states.
        call: function of the subject.
        inputs: its arguments by name.
        expected: numbers, nested like the answer, or `SameAs`.
        why: what goes wrong where it does not hold.
        tolerance: largest difference, as a share of a right value above 1.
    """

    section: str
    name: str
    call: str
    inputs: dict[str, Any]
    expected: Any
    why: str
    tolerance: float = 1e-6

    @property
    def right_inputs(self) -> dict[str, Any] | None:
        """All arguments of the call that gives the right value; None where it is a number."""
        return self.inputs | self.expected.inputs if isinstance(self.expected, SameAs) else None


LOSS = "loss aggregation"
SHORT_AND_LONG = {"losses": [[1, 0, 0, 0], [2, 2, 2, 0]], "mask": [[1, 0, 0, 0], [1, 1, 1, 0]]}
AGGREGATION = (
    Property(
        LOSS, "token-mean counts tokens, not answers", "aggregate",
        {**SHORT_AND_LONG, "mode": "token-mean"}, 1.75,
        "a mean of means counts a token of a long answer less",
    ),
    Property(
        LOSS, "seq-mean-token-mean counts answers alike", "aggregate",
        {**SHORT_AND_LONG, "mode": "seq-mean-token-mean"}, 1.5,
        "each answer's mean counts the same, however long it is",
    ),
    Property(
        LOSS, "seq-mean-token-sum sums, then averages", "aggregate",
        {**SHORT_AND_LONG, "mode": "seq-mean-token-sum"}, 3.5,
        "a mean in place of the sum divides by the length after all",
    ),
    Property(
        LOSS, "a constant divisor keeps the mean of answers", "aggregate",
        {**SHORT_AND_LONG, "mode": "seq-mean-token-sum-norm", "limit": 4}, 0.875,
        "without the mean over answers the loss grows with the batch",
    ),
    Property(
        LOSS, "a masked token counts in no denominator", "aggregate",
        {"losses": [[1, 1, 100]], "mask": [[1, 1, 0]], "mode": "token-mean"}, 1,
        "what is not trained weighs on what is",
    ),
    Property(
        LOSS, "five tokens of loss 2 have mean 2", "aggregate",
        {"losses": [[2, 2], [2, 2, 2]], "mask": [[1, 1], [1, 1, 1]], "mode": "token-mean"}, 2,
        "a loss that is not divided raises the learning rate",
    ),
    Property(
        LOSS, "NaN on a masked token changes nothing", "aggregate",
        {"losses": [[1, NAN, NAN, NAN], [2, 2, 2, NAN]], "mask": [[1, 0, 0, 0], [1, 1, 1, 0]], "mode": "token-mean"},
        1.75, "0 × NaN is NaN: masked values must be left out, not multiplied",
    ),
    Property(
        LOSS, "padding of any length changes nothing", "aggregate",
        {"losses": [[1, 0, 0, 0, 0, 0, 0], [2, 2, 2]], "mask": [[1, 0, 0, 0, 0, 0, 0], [1, 1, 1]],
         "mode": "seq-mean-token-mean"}, 1.5,
        "a mean over the padded width depends on the longest answer of the batch",
    ),
    Property(
        LOSS, "two micro-batches add up to one batch", "aggregate",
        {**SHORT_AND_LONG, "mode": "token-mean", "parts": [[0], [1]]}, 1.75,
        "a mean of micro-batch means depends on how the batch was split",
    ),
    Property(
        LOSS, "uneven parts add up to one batch", "aggregate",
        {"losses": [[4], [1, 1, 1], [2, 2]], "mask": [[1], [1, 1, 1], [1, 1]], "mode": "seq-mean-token-mean",
         "parts": [[2, 0], [1]]}, 7 / 3,
        "a rank with few answers must not count as much as one with many",
    ),
    Property(
        LOSS, "an untrained answer counts nowhere", "aggregate",
        {"losses": [[1, 1], [5, 5]], "mask": [[1, 1], [0, 0]], "mode": "seq-mean-token-mean"}, 1,
        "an empty answer halves the loss of the others",
    ),
    Property(
        LOSS, "a cut-off answer left out counts nowhere", "aggregate",
        {"losses": [[1, 1, 1, 1], [1, 1, 1, 1]], "mask": [[1, 1, 1, 1], [1, 1, 1, 1]], "mode": "token-mean",
         "truncated": [0, 1]}, 1,
        "the denominator is counted after masking, not before",
    ),
    Property(
        LOSS, "nothing trained is a loss of 0", "aggregate",
        {"losses": [[1, 1], [1, 1]], "mask": [[0, 0], [0, 0]], "mode": "token-mean"}, 0,
        "0 / 0 is NaN, and NaN in one update destroys the weights",
    ),
)  # fmt: skip

BASELINE = "advantages"
TWO_GROUPS = {"rewards": [1, 0, 10, 0], "groups": [0, 0, 1, 1]}
ADVANTAGES = (
    *(
        Property(
            BASELINE, f"eight equal rewards of {value:g} give exactly 0", "group_advantages",
            {"rewards": [value] * 8, "groups": [0] * 8}, [0] * 8,
            "a float32 deviation of equal numbers is not 0, and dividing by it moves the weights", tolerance=0,
        )
        for value in (0.1, 0.7)
    ),
    Property(
        BASELINE, "rewards equal but for rounding give 0", "group_advantages",
        {"rewards": [0.1 + 0.2, 0.3, 0.3, 0.3], "groups": [0] * 4}, [0] * 4,
        "a rounding error becomes an advantage of 1.5", tolerance=0,
    ),
    Property(
        BASELINE, "one right answer of four", "group_advantages",
        {"rewards": [1, 0, 0, 0], "groups": [0] * 4}, [1.5, -0.5, -0.5, -0.5],
        "(r - mean) / std, the deviation with Bessel's correction",
    ),
    Property(
        BASELINE, "a group's own deviation makes groups alike", "group_advantages",
        {**TWO_GROUPS, "scale": "group"}, [0.5**0.5, -(0.5**0.5)] * 2,
        "dividing by the deviation of another set weighs problems by the scale of their rewards",
    ),
    Property(
        BASELINE, "without scale differences stay", "group_advantages",
        {**TWO_GROUPS, "scale": "none"}, [0.5, -0.5, 5, -5],
        "a hidden division changes the size of every update",
    ),
    Property(
        BASELINE, "groups are told apart by id, not by place", "group_advantages",
        {"rewards": [1, 5, 0, 5], "groups": [7, 3, 7, 3], "scale": "none"}, [0.5, 0, -0.5, 0],
        "reordering or filtering mixes the answers of different problems",
    ),
    Property(
        BASELINE, "leave-one-out compares with the others", "group_advantages",
        {"rewards": [1, 0, 0, 0], "groups": [0] * 4, "baseline": "leave-one-out"}, [1, -1 / 3, -1 / 3, -1 / 3],
        "an answer in its own baseline shrinks its advantage",
    ),
    Property(
        BASELINE, "leave-one-out of equals is exactly 0", "group_advantages",
        {"rewards": [1, 1, 1, 1], "groups": [0] * 4, "baseline": "leave-one-out"}, [0] * 4,
        "dividing by a deviation of 0 explodes", tolerance=0,
    ),
    Property(
        BASELINE, "each trained token has the advantage", "token_advantages",
        {"rewards": [1, 0], "groups": [0, 0], "mask": [[0, 1, 1, 0, 1], [0, 1, 0, 0, 1]]},
        [[0, 0.5**0.5, 0.5**0.5, 0, 0.5**0.5], [0, -(0.5**0.5), 0, 0, -(0.5**0.5)]],
        "what an environment says between two turns is not trained, and shifts nothing",
    ),
    Property(
        BASELINE, "a return survives a mask in between", "discounted_returns",
        {"rewards": [[0, 0, 0, 0, 1]], "mask": [[1, 1, 0, 0, 1]], "gamma": 0.9}, [[0.81, 0.9, 0, 0, 1]],
        "a running sum set to 0 off the mask loses the reward behind a tool's output",
    ),
    Property(
        BASELINE, "NaN rewards off the mask change no return", "discounted_returns",
        {"rewards": [[NAN, 0, NAN, 1, NAN]], "mask": [[0, 1, 0, 1, 0]], "gamma": 0.5}, [[0, 0.5, 0, 1, 0]],
        "values on prompt and padding are leftovers",
    ),
    Property(
        BASELINE, "whitening of one token is finite", "whiten",
        {"values": [[0, NAN]], "mask": [[1, 0]]}, [[0, 0]],
        "Bessel's correction divides by 0",
    ),
    Property(
        BASELINE, "whitening of equal values is exactly 0", "whiten",
        {"values": [[0.7, 0.7, 0.7], [0.7, 9]], "mask": [[1, 1, 1], [1, 0]]}, [[0, 0, 0], [0, 0]],
        "rounding errors become advantages", tolerance=0,
    ),
    Property(
        BASELINE, "whitening looks at trained tokens alone", "whiten",
        {"values": [[1, 9, 2], [NAN, 3]], "mask": [[1, 0, 1], [0, 1]]}, [[-1, 0, 0], [0, 1]],
        "padding moves mean and deviation",
    ),
    Property(
        BASELINE, "running statistics survive a checkpoint", "running_normalized",
        {"batches": [[1, 2, 3], [4, 5, 6]]}, [[-1, 0, 1], [0.5 / 3.5**0.5, 1.5 / 3.5**0.5, 2.5 / 3.5**0.5]],
        "a resumed run starts over with the mean and deviation of its first batch",
    ),
    Property(
        BASELINE, "a group of equal accuracy teaches nothing", "group_kept",
        {"accuracies": [0.1] * 8, "rewards": [0.1] * 8}, 0,
        "a float32 deviation above 0 keeps a group without a signal",
    ),
    Property(
        BASELINE, "shaped rewards do not keep a group", "group_kept",
        {"accuracies": [1, 1, 1], "rewards": [1, 0.7, 0.2]}, 0,
        "with a length penalty no two rewards are equal, and nothing is ever filtered",
    ),
    Property(
        BASELINE, "a group of right and wrong answers is kept", "group_kept",
        {"accuracies": [1, 0, 1], "rewards": [0.5, 0.5, 0.5]}, 1,
        "the filter looks at what the task says, not at the reward",
    ),
    Property(
        BASELINE, "a total is the weighted sum of rewards", "weighted_reward",
        {"rewards": [1, 1], "weights": [1, 0.5]}, 1.5,
        "what is logged must be what is trained on",
    ),
)  # fmt: skip

GAE = "generalized advantages"
ESTIMATES = (
    Property(
        GAE, "three tokens by hand", "gae",
        {"rewards": [[0, 0, 1]], "values": [[0.5, 0.5, 0.5]], "mask": [[1, 1, 1]], "gamma": 1, "lam": 0.95},
        [[0.45125, 0.475, 0.5]],
        "the value after the last token is 0",
    ),
    Property(
        GAE, "the estimate does not bootstrap through pads", "gae",
        {"rewards": [[0, 0, 1, 0, 0]], "values": [[0.5, 0.5, 0.5, 9, 9]], "mask": [[1, 1, 1, 0, 0]], "gamma": 1,
         "lam": 0.95}, [[0.45125, 0.475, 0.5, 0, 0]],
        "a critic's value of padding leaks into the answer",
    ),
    Property(
        GAE, "NaN values on prompt and pads change nothing", "gae",
        {"rewards": [[NAN, 0, 0, 1, NAN]], "values": [[NAN, 0.5, 0.5, 0.5, NAN]], "mask": [[0, 1, 1, 1, 0]],
         "gamma": 1, "lam": 0.95}, [[0, 0.45125, 0.475, 0.5, 0]],
        "masked values must be left out, not multiplied by 0",
    ),
    Property(
        GAE, "time counts actions, not what is observed", "gae",
        {"rewards": [[0, 0, 0, 1]], "values": [[0.5, 9, 9, 0.5]], "mask": [[1, 0, 0, 1]], "gamma": 1, "lam": 0.95},
        [[0.475, 0, 0, 0.5]],
        "a tool's output costs a discount, or its value replaces the next turn's",
    ),
)  # fmt: skip

KL = "KL"
APART = {"logprobs": [-1], "reference_logprobs": [-2], "coefficient": 1}
DIVERGENCE = (
    *(
        each
        for estimator, value, gradient in (
            ("k1", 1, 1), ("k2", 0.5, 1), ("k3", math.exp(-1), 1 - math.exp(-1)),
        )
        for each in (
            Property(
                KL, f"KL estimator {estimator}: value", "kl_penalty", {**APART, "estimator": estimator}, [value],
                "a loss goes up when the policy leaves the reference",
            ),
            Property(
                KL, f"KL estimator {estimator}: gradient", "kl_penalty_gradient",
                {**APART, "estimator": estimator}, [gradient],
                "an estimator without a gradient is logged and changes nothing",
            ),
        )
    ),
    Property(
        KL, "k3 of equal policies pulls nowhere", "kl_penalty_gradient",
        {"logprobs": [-1, -7], "reference_logprobs": [-1, -7], "coefficient": 1, "estimator": "k3"}, [0, 0],
        "a penalty with a gradient there moves a policy that has not left", tolerance=0,
    ),
    Property(
        KL, "the coefficient scales the penalty once", "kl_penalty_gradient",
        {**APART, "coefficient": 0.1, "estimator": "k3"}, [0.1 - 0.1 * math.exp(-1)],
        "β² is nearly nothing",
    ),
    Property(
        KL, "the expected gradient is the divergence's", "expected_kl_gradient",
        {"probabilities": [0.5, 0.3, 0.2], "reference": [0.2, 0.5, 0.3]}, [0.3462430, -0.2203891, -0.1258540],
        "without the score-function term an estimator's gradient is another one",
    ),
    Property(
        KL, "in the reward it comes off once", "penalized_reward",
        {"reward": 1, "logprobs": [-1, -1], "reference_logprobs": [-1.1, -1.2], "coefficient": 1}, 0.7,
        "token by token and in sum is twice",
    ),
    Property(
        KL, "a coefficient of 0 needs no reference", "reference_needed", {"coefficient": 0}, 0,
        "a model is loaded for nothing",
    ),
    Property(
        KL, "a coefficient needs a reference", "reference_needed", {"coefficient": 0.1}, 1,
        "a penalty without its model is silently none",
    ),
)  # fmt: skip

SURROGATE = "policy loss"
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
UNCHANGED = {"logprobs": [-0.3, -7.1, -0.0001], "old_logprobs": [-0.3, -7.1, -0.0001], "advantages": [1.5, -0.5, 0]}
GONE_UP = {"logprobs": [-1, -1, -1], "old_logprobs": [-1.1, -1.5, -1.5], "advantages": [2, 1, -1]}
POLICY = (
    Property(
        SURROGATE, "at ratio 1 the loss is minus the advantage", "policy_loss", {**UNCHANGED, **CLIP}, [-1.5, 0.5, 0],
        "the first update is the plain policy gradient", tolerance=0,
    ),
    Property(
        SURROGATE, "at ratio 1 nothing is clipped", "policy_loss_gradient", {**UNCHANGED, **CLIP}, [-1.5, 0.5, 0],
        "the first update is the plain policy gradient", tolerance=0,
    ),
    Property(
        SURROGATE, "gains are clipped, losses are not", "policy_loss", {**GONE_UP, **CLIP},
        [-2 * math.exp(0.1), -1.2, math.exp(0.5)],
        "a bad token that became likelier must be pushed back",
    ),
    Property(
        SURROGATE, "a clipped token has no gradient", "policy_loss_gradient", {**GONE_UP, **CLIP},
        [-2 * math.exp(0.1), 0, math.exp(0.5)],
        "clipping takes the gradient, not only the value",
    ),
    Property(
        SURROGATE, "CISPO's bounds are absolute weights", "cispo_weights", {"ratios": [6, 1, 0.01], "weight_max": 5},
        [5, 1, 0.01], "read as distances from 1 they cut other tokens",
    ),
    Property(
        SURROGATE, "truncated weights stop at the bound", "correction_weights",
        {"old_logprobs": [-1, -1, -3], "rollout_logprobs": [-2, -1, -1], "mode": "truncate", "low": 0, "high": 2},
        [2, 1, math.exp(-2)], "the trainer's probability over the engine's, not the other way round",
    ),
    Property(
        SURROGATE, "masked weights drop what is outside", "correction_weights",
        {"old_logprobs": [-1, -1, -3], "rollout_logprobs": [-2, -1, -1], "mode": "mask", "low": 0.5, "high": 2},
        [0, 1, 0], "cutting keeps what masking is to drop",
    ),
)  # fmt: skip

LOGPROBS = "log-probabilities"
QUESTION = [8, 20, 31, 22, 10]
ROWS = {"rows": [[8, 20, 31, 22, 9], [8, 20, 31, 22, 24, 30, 41, 9], [8, 21, 9]],
        "mask": [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 1, 1], [0, 1, 1]]}  # fmt: skip
PROBABILITIES = (
    *(
        Property(
            LOGPROBS, f"temperature {temperature:g} divides the logits", "token_logprobs",
            {"logits": [[2, 1, 0]], "tokens": [0], "temperature": temperature}, [right],
            "a trainer at temperature 1 computes another policy than the one that sampled",
        )
        for temperature, right in ((1, -0.4076060), (0.5, -0.1429317), (2, -0.6802697))
    ),
    Property(
        LOGPROBS, "log-probabilities are float32", "token_logprobs",
        {"logits": [[10.03, 10, 9.97, 0]], "tokens": [0], "temperature": 1}, [-1.0689274],
        "bfloat16 rounds 10.03 to 10: off by 0.03 here, by 0.07 over a large vocabulary",
    ),
    Property(
        LOGPROBS, "entropy of four equal tokens is log 4", "entropy", {"logits": [[3, 3, 3, 3]]}, [math.log(4)],
        "nats of the whole distribution, not of the sampled token",
    ),
    Property(
        LOGPROBS, "a row alone equals the row in a batch", "model_logprobs",
        {**ROWS, "temperature": 0.7, "together": 1}, SameAs({"together": 0}),
        "padding on the wrong side, positions that do not start at 0, or rows that see each other", tolerance=1e-5,
    ),
    Property(
        LOGPROBS, "the same pass twice gives equal numbers", "model_logprobs",
        {**ROWS, "temperature": 0.7, "together": 1}, SameAs({}),
        "dropout in one of two passes makes every ratio wrong", tolerance=0,
    ),
    Property(
        LOGPROBS, "what follows an answer changes nothing in it", "model_logprobs",
        {"rows": [[8, 20, 31, 22, 9, 40, 41, 42]], "mask": [[0, 0, 0, 1, 1, 0, 0, 0]], "temperature": 1, "together": 1},
        SameAs({"rows": [[8, 20, 31, 22, 9, 0, 0, 0]]}),
        "attention to leftovers behind the end token", tolerance=1e-6,
    ),
    Property(
        LOGPROBS, "the only token of an answer is trained", "model_trained_positions",
        {"rows": [[8, 20, 31]], "mask": [[0, 0, 1]]}, [[0, 0, 1]],
        "a mask off by one never trains the first token of an answer",
    ),
    Property(
        LOGPROBS, "on-policy ratios are 1 at temperature 0.7", "on_policy_ratios",
        {"prompt": QUESTION, "temperature": 0.7, "max_tokens": 12, "samples": 8, "seed": 0, "updates": 0}, [1, 1, 1],
        "engine and trainer disagree about temperature, precision or positions", tolerance=1e-4,
    ),
    Property(
        LOGPROBS, "after update and sync ratios are 1 again", "on_policy_ratios",
        {"prompt": QUESTION, "temperature": 0.7, "max_tokens": 12, "samples": 8, "seed": 0, "updates": 1}, [1, 1, 1],
        "the engine goes on with old weights, all or some, or with a stale cache", tolerance=1e-4,
    ),
    Property(
        LOGPROBS, "one seed gives a group different answers", "answers_differ",
        {"prompt": QUESTION, "temperature": 1, "max_tokens": 12, "samples": 8, "seed": 3}, 1,
        "a run's seed in each request makes all answers equal and all advantages 0",
    ),
)  # fmt: skip

ENDS = "ends and budgets"
BUDGETS = (
    Property(
        ENDS, "an answer ends with its first end token", "answer_mask",
        {"ids": [5, 6, 1, 7, 1, 0], "end": 1, "pad": 0, "budget": 6}, [1, 1, 1, 0, 0, 0],
        "an end token left out is never learned; what follows it is not an answer",
    ),
    Property(
        ENDS, "padding by the end token keeps the first one", "answer_mask",
        {"ids": [5, 6, 0, 0], "end": 0, "pad": 0, "budget": 4}, [1, 1, 1, 0],
        "masking every pad masks the end token too, and the model never learns to stop",
    ),
    Property(
        ENDS, "a budget of four samples four tokens", "answer_mask",
        {"ids": [5, 6, 5, 6, 5, 6], "end": 1, "pad": 0, "budget": 4}, [1, 1, 1, 1, 0, 0],
        "lengths are reported and penalized as they were sampled",
    ),
    Property(
        ENDS, "the overlong penalty grows over the buffer", "overlong_penalty",
        {"lengths": [15, 16, 18, 20], "limit": 20, "buffer": 5}, [0, -0.2, -0.6, -1],
        "0 up to the buffer, -1 at the limit",
    ),
    *(
        Property(
            ENDS, f"{setting} {value:g} is {'accepted' if right else 'refused'}", "accepted",
            {"setting": setting, "value": value}, right, why,
        )
        for setting, value, right, why in (
            ("overlong_buffer", 0, 0, "0 / 0 is NaN"),
            ("overlong_buffer", 5, 1, "what makes sense is accepted"),
            ("temperature", 0, 0, "greedy answers are all equal, and nothing can be divided by 0"),
            ("temperature", -1, 0, "it would prefer the least likely tokens"),
            ("group_size", 1, 0, "one answer has nothing to be compared with: nothing is trained, silently"),
            ("group_sise", 8, 0, "a setting nobody reads is dropped in silence"),
        )
    ),
)  # fmt: skip

UPDATES = "updates"
TRAINED = {**ROWS, "advantages": [1, -0.5, 0.7], "temperature": 0.7}
STEPS = (
    Property(
        UPDATES, "micro-batches change no gradient", "update_gradient",
        {**TRAINED, "batch_tokens": 8, "packing": 0}, SameAs({"batch_tokens": 1024}),
        "the learning rate would depend on the memory of the device", tolerance=1e-5,
    ),
    Property(
        UPDATES, "packing rows changes no gradient", "update_gradient",
        {**TRAINED, "batch_tokens": 1024, "packing": 1}, SameAs({"packing": 0}),
        "packed rows see each other, or their positions run on", tolerance=1e-5,
    ),
    Property(
        UPDATES, "the order of samples changes no gradient", "update_gradient",
        {**TRAINED, "batch_tokens": 12, "packing": 1},
        SameAs({"rows": ROWS["rows"][::-1], "mask": ROWS["mask"][::-1], "advantages": TRAINED["advantages"][::-1]}),
        "whatever is tied to a place in the batch is tied to nothing", tolerance=1e-5,
    ),
    Property(
        UPDATES, "an untrained sample changes no gradient", "update_gradient",
        {"rows": [*ROWS["rows"], [8, 30, 9]], "mask": [*ROWS["mask"], [0, 0, 0]], "advantages": [1, -0.5, 0.7, 5],
         "temperature": 0.7, "batch_tokens": 1024, "packing": 0}, SameAs(TRAINED),
        "it counts in a denominator", tolerance=1e-5,
    ),
    Property(
        UPDATES, "a NaN advantage off the mask changes nothing", "update_gradient",
        {**TRAINED, "advantages": [[NAN, NAN, NAN, 1, 1], [NAN, NAN, NAN, 1, 1, NAN, 1, 1], [NAN, 1, 1]],
         "batch_tokens": 1024, "packing": 0}, SameAs({"advantages": [1, 1, 1]}),
        "0 × NaN is NaN", tolerance=1e-6,
    ),
    Property(
        UPDATES, "every sample twice changes no gradient", "update_gradient",
        {"rows": ROWS["rows"] * 2, "mask": ROWS["mask"] * 2, "advantages": TRAINED["advantages"] * 2,
         "temperature": 0.7, "batch_tokens": 1024, "packing": 0}, SameAs(TRAINED),
        "a sum in place of a mean: the learning rate grows with the batch", tolerance=1e-5,
    ),
    Property(
        UPDATES, "update and forward pass agree at 0.7", "update_gap",
        {**TRAINED, "batch_tokens": 12}, 0,
        "a temperature, a mask or a precision that one of them has and the other has not", tolerance=1e-5,
    ),
    Property(
        UPDATES, "the first update has KL 0 to the old policy", "first_update_kl",
        {**TRAINED, "batch_tokens": 12}, 0,
        "old log-probabilities of another pass are of another policy", tolerance=0,
    ),
    Property(
        UPDATES, "equal rewards leave weights as they are", "weight_change",
        {**ROWS, "rewards": [0.1, 0.1, 0.1], "groups": [0, 0, 0]}, 0,
        "Adam takes a full step for a gradient of any size", tolerance=0,
    ),
    Property(
        UPDATES, "nothing to train leaves weights as they are", "weight_change",
        {"rows": ROWS["rows"], "mask": [[0] * len(row) for row in ROWS["rows"]], "rewards": [1, 0, 1],
         "groups": [0, 0, 0]}, 0,
        "0 / 0 in one update destroys the weights", tolerance=0,
    ),
    Property(
        UPDATES, "the better answer gains on the other", "gains",
        {"rows": [[8, 20, 31, 22], [8, 20, 31, 40]], "mask": [[0, 0, 0, 1], [0, 0, 0, 1]], "rewards": [1, 0],
         "groups": [0, 0]}, [1, -1],
        "a sign is wrong between reward and weights",
    ),
    *(
        Property(
            UPDATES, f"each of {samples} samples on {ranks} rank{'s' * (ranks > 1)} is trained once", "times_trained",
            {"samples": samples, "ranks": ranks, "per_batch": 4}, [1] * samples,
            "what does not divide evenly is dropped, doubled, or an error",
        )
        for samples, ranks in ((9, 2), (10, 1))
    ),
    Property(
        UPDATES, "a cosine after warm-up is not 0 early", "learning_rate",
        {"peak": 1, "step": 198, "total": 220, "warmup": 22, "schedule": "cosine"}, (1 + math.cos(math.pi * 8 / 9)) / 2,
        "warm-up steps subtracted twice end the schedule early",
    ),
)  # fmt: skip

PROPERTIES: tuple[Property, ...] = (
    *AGGREGATION, *ADVANTAGES, *ESTIMATES, *DIVERGENCE, *POLICY, *PROBABILITIES, *BUDGETS, *STEPS,
)  # fmt: skip
