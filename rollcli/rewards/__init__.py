"""Reward functions by name. A reward is a plain function that takes what it needs by keyword."""

from rollcli.rewards.base import RewardResult

__all__ = ["BUILTIN", "RewardResult"]

BUILTIN = {
    "choice": "rollcli.rewards.choice:choice",
    "code": "rollcli.rewards.code:code",
    "format": "rollcli.rewards.format:format",
    "ifeval": "rollcli.rewards.ifeval.checker:ifeval",
    "ifeval_loose": "rollcli.rewards.ifeval.checker:ifeval_loose",
    "length": "rollcli.rewards.length:length",
    "math": "rollcli.rewards.math:math",
    "qa": "rollcli.rewards.qa:qa",
    "qa_f1": "rollcli.rewards.qa:qa_f1",
    "repetition": "rollcli.rewards.repetition:repetition",
    "success": "rollcli.rewards.success:success",
}
