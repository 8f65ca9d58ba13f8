"""Parts of a worker's memory, and what they add up to in each stage."""

from __future__ import annotations

from dataclasses import dataclass

from rollcli.config.schema import Recipe, RlRecipe
from rollcli.devices.arithmetic import Arithmetic
from rollcli.devices.facts import ModelFacts
from rollcli.devices.hardware import GIB


@dataclass(frozen=True)
class Part:
    """One part of a worker's memory.

    Attributes:
        name: `weights`, `masters`, `optimizer`, `gradients`, `activations`, `logits`, `kv`, or others that tables sum.
        gib: size in GiB.
        formula: where the number comes from, with its numbers.
        stages: when it is there; empty is always.
        host: in main memory, while the worker holds an accelerator.
        once: on the role's first worker alone.
    """

    name: str
    gib: float
    formula: str
    stages: tuple[str, ...] = ()
    host: bool = False
    once: bool = False


@dataclass(frozen=True)
class Setting:
    """What the parts of one role depend on.

    Attributes:
        gpu: whether there are accelerators.
        memory_gib: of the accelerator that has least; 0 when it is not known.
    """

    recipe: Recipe
    facts: ModelFacts
    sizes: Arithmetic
    gpu: bool
    memory_gib: float = 0.0

    @property
    def width(self) -> int:
        """Bytes of one number in the forward pass; the recipe's `model.dtype` when it names one."""
        named = {"float32": 4, "bfloat16": 2}
        return named.get(self.recipe.model.dtype, 2 if self.gpu else 4)

    @property
    def bucket_gib(self) -> float:
        """Float32 weights that a sync moves at once: `rollout.sync.bucket_mib`, or the largest tensor."""
        facts = self.facts
        asked = self.recipe.rollout.sync.bucket_mib / 1024 if isinstance(self.recipe, RlRecipe) else 0.0
        return min(max(asked, 4 * facts.vocab * facts.hidden / GIB), 4 * facts.total / GIB)


def peak_stage(parts: tuple[Part, ...]) -> str | None:
    """Returns the stage in which the parts need most, or None when none has a stage."""
    stages = dict.fromkeys(stage for part in parts for stage in part.stages if not part.host)
    return max(stages, key=lambda stage: stage_gib(parts, stage), default=None)


def stage_gib(parts: tuple[Part, ...], stage: str | None) -> float:
    """Returns the memory in `stage`: its parts and those always there. What is in main memory does not count."""
    return sum(part.gib for part in parts if not part.host and (not part.stages or stage in part.stages))


def peak_gib(parts: tuple[Part, ...]) -> float:
    """Returns the most memory the parts take at any time."""
    return stage_gib(parts, peak_stage(parts))


def role_gib(parts: tuple[Part, ...], workers: int) -> float:
    """Returns the memory of all workers of a role, each at its peak."""
    others = tuple(part for part in parts if not part.once)
    return peak_gib(parts) + (workers - 1) * peak_gib(others)
