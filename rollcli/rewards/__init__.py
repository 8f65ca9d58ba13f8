"""Rewards by name: plain functions that take what they need by keyword, and classes that ask a model (`asking.py`)."""

from rollcli.rewards.base import RewardResult

__all__ = ["BUILTIN", "RewardResult"]

BUILTIN = {
    "choice": "rollcli.rewards.choice:choice",
    "code": "rollcli.rewards.code:code",
    "format": "rollcli.rewards.format:format",
    "ifeval": "rollcli.rewards.ifeval.checker:ifeval",
    "ifeval_loose": "rollcli.rewards.ifeval.checker:ifeval_loose",
    "judge": "rollcli.rewards.judge:Judge",
    "length": "rollcli.rewards.length:length",
    "math": "rollcli.rewards.math:math",
    "qa": "rollcli.rewards.qa:qa",
    "qa_f1": "rollcli.rewards.qa:qa_f1",
    "reasoning_gym": "rollcli.rewards.reasoning_gym:reasoning_gym",
    "repetition": "rollcli.rewards.repetition:repetition",
    "reward_model": "rollcli.rewards.reward_model:RewardModel",
    "success": "rollcli.rewards.success:success",
}
