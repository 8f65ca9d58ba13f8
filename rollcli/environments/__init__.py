"""Environments by name."""

BUILTIN = {
    "single_turn": "rollcli.environments.single_turn:SingleTurn",
}
