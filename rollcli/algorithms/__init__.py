"""Algorithms by name. Modules here import no torch: losses call tensor methods, so a recipe is checked without it."""

BUILTIN = {
    "grpo": "rollcli.algorithms.grpo:Grpo",
    "sft": "rollcli.algorithms.sft:Sft",
}
