"""An episode's life.

admit ─▶ waiting ─▶ generating ⇄ acting ─▶ scoring ─▶ done
             │           │          │         │
             └───────────┴──────────┴─────────┴─────▶ failed │ aborted

state        waits for                    unblocked by
waiting      room on its replica          the router (rollout/router.py)
generating   tokens                       the replica's completion
acting       the environment              its `reset` or `step`
scoring      every reward of the sample   the reward worker
done         –                            the scheduler takes it
failed       –                            the scheduler takes it, counted by kind
aborted      –                            the scheduler asked for it
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class State(StrEnum):
    """Where an episode stands."""

    WAITING = "waiting"
    GENERATING = "generating"
    ACTING = "acting"
    SCORING = "scoring"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


LIVING = (State.WAITING, State.GENERATING, State.ACTING, State.SCORING)
"""States that an episode leaves again."""


class Census:
    """How many episodes are in which state; every transition goes through `move`."""

    def __init__(self) -> None:
        self.counts: Counter[State] = Counter()

    def admit(self) -> None:
        """One more episode, waiting."""
        self.counts[State.WAITING] += 1

    def move(self, before: State, after: State) -> None:
        """One episode changes its state."""
        self.counts[before] -= 1
        self.counts[after] += 1

    def snapshot(self) -> dict[str, int]:
        """Returns how many living episodes each state holds; those that ended are counted by whoever asked for them."""
        return {state.value: self.counts[state] for state in LIVING if self.counts[state]}
