"""Reward functions by name. A reward is a plain function that takes what it needs by keyword."""

BUILTIN = {
    "math": "rollcli.rewards.math:math",
}
