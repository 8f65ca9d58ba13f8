"""Reward functions by name. A reward is a plain function that takes what it needs by keyword."""

from rollcli.rewards.base import RewardResult

__all__ = ["BUILTIN", "RewardResult"]

BUILTIN = {
    "code": "rollcli.rewards.code:code",
    "math": "rollcli.rewards.math:math",
}
