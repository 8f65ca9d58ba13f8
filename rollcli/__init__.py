"""Reinforcement learning post-training of language models: the `roll` command line and the system behind it."""

from rollcli import companions

__version__ = "0.1.0"

companions.settle()
