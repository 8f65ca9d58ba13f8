"""Nothing but seeds: for environments that open the episode themselves, such as `gym`."""

from __future__ import annotations

from dataclasses import dataclass

from rollcli.data.sources.base import Problem, Split


@dataclass
class SeedsSource:
    """Endless problems without a text; `Task.seed`, which differs between splits, makes each another instance."""

    prompt: str = ""
    """A message before what the environment shows; empty for none."""

    def open(self, split: Split, seed: int) -> SeedsItems:
        """Returns the endless problems of a split."""
        return SeedsItems(self)


class SeedsItems:
    """Each problem is the same; the task made of it has a seed of its own."""

    size = None

    def __init__(self, source: SeedsSource) -> None:
        self.source = source
        self.fingerprint = f"seeds:{source.prompt}"

    def __getitem__(self, index: int) -> Problem:
        messages = [{"role": "user", "content": self.source.prompt}] if self.source.prompt else []
        return Problem(messages, {"success": 0.0})
