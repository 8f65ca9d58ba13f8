"""What a model's tensors are called on the hub, and in what form they lie there.

transformers holds some models otherwise in memory than their checkpoints do: the experts of a Mixtral or Qwen mixture
are one tensor `mlp.experts.gate_up_proj` `[E, 2I, H]` in memory, and E pairs of matrices on the hub. Engines talk to
each other, and to the disk, in the hub's names alone; this module translates, by the conversions of transformers
itself (`transformers.conversion_mapping`), those that `save_pretrained` and `from_pretrained` use.

A conversion moves elements and computes nothing, so what lies element by element beside a weight (an optimizer's
moments) converts by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from rollcli.errors import EngineError, WeightSyncError

Tensors = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
NAMES_SHOWN = 5
"""Names of each kind that an error lists."""


@dataclass(frozen=True)
class Group:
    """Tensors that convert together.

    Attributes:
        memory: their names in memory.
        hub: their names on the hub.
    """

    memory: tuple[str, ...]
    hub: tuple[str, ...]

    @property
    def plain(self) -> bool:
        """True for one tensor that at most changes its name."""
        return len(self.memory) == len(self.hub) == 1


class Naming:
    """The names of one model, worked out once from its tensors' names and shapes; holds no tensor.

    Persistent buffers count as weights. Of tied weights one has a name here, the first, and the others are `aliases`.
    How the model was loaded does not matter: names are those of the architecture.

    Args:
        model: any, also on the meta device, but not yet sharded, nor with adapters.

    Attributes:
        groups: every tensor of the model, by what converts together; nearly all are groups of one.
        tied: the same of further names that tied weights have.
        shapes: shape of every tensor on the hub, by its name there.
        aliases: name on the hub of each further tied weight, and that of the first.
        buffers: names on the hub of what is not trained.

    Raises:
        EngineError: transformers does not find the way back from the hub's names.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        tensors = _tensors(model)
        # Conversions run on the meta device to learn the names and shapes that they make.
        empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        self._model = _Shapes(model.config, empty)
        transforms = [
            # As `save_pretrained` does for a model that does not know where it came from.
            each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)
        ]  # fmt: skip
        self._back: dict[Group, _Conversion] = {}
        self._forth: dict[Group, _Conversion] = {}
        hub: dict[str, torch.Tensor] = {}
        for conversion in _conversions(empty, [each.reverse_transform() for each in transforms[::-1]], reverse=True):
            made = conversion.run(empty, self._model)
            self._back[Group(tuple(conversion.patterns), tuple(made))] = conversion
            hub |= made
        self._by_memory = {name: group for group in self._back for name in group.memory}
        self._by_hub = {name: group for group in self._back for name in group.hub}
        known = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": empty}
        for conversion in _conversions(hub, transforms, reverse=False, **known):
            group = self._by_hub[next(iter(conversion.patterns))]
            made = conversion.run(hub, self._model)
            if {name: made[name].shape for name in made} != {name: empty[name].shape for name in group.memory}:
                raise EngineError(
                    f"a `{model.config.model_type}` model's `{group.memory[0]}` becomes `{group.hub[0]}` on the hub, "
                    f"and transformers {transformers.__version__} does not make the one of the other again",
                    hint="train a model of another architecture, or with another version of transformers",
                )
            self._forth[group] = conversion
        firsts = _firsts(tensors)
        self.groups = list(dict.fromkeys(self._by_memory[name] for name in dict.fromkeys(firsts.values())))
        self.tied = list(dict.fromkeys(self._by_memory[name] for name, first in firsts.items() if name != first))
        self.shapes = {name: tuple(hub[name].shape) for group in self.groups for name in group.hub}
        self.aliases = {
            alias: original
            for name, first in firsts.items()
            if name != first
            for alias, original in zip(self._by_memory[name].hub, self._by_memory[first].hub, strict=True)
        }
        trained = {name for name, _ in model.named_parameters()}
        self.buffers = {name for group in self.groups if not trained & set(group.memory) for name in group.hub}

    def to_hub(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Returns tensors as the hub names and holds them; those that are not converted are the same objects.

        Args:
            tensors: by their names in memory; any whole groups of the model's.

        Raises:
            WeightSyncError: a name is unknown, or a tensor of a group is missing.
        """
        groups = self._given(tensors, self._by_memory)
        return {n: t for group in groups for n, t in self._back[group].run(tensors, self._model).items()}

    def from_hub(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Returns tensors as the model names and holds them: the inverse of `to_hub`, under the same conditions."""
        groups = self._given(tensors, self._by_hub)
        return {n: t for group in groups for n, t in self._forth[group].run(tensors, self._model).items()}

    def hub_name(self, name: str) -> str:
        """Returns what one tensor, which at most changes its name, is called on the hub."""
        return self._by_memory[name].hub[0]

    def check(self, weights: Tensors) -> None:
        """Checks that weights in the hub's naming are all of the model's and no others; buffers may be missing.

        Of tied weights one is enough; if several come, they must be equal.

        Raises:
            WeightSyncError: a name is unknown or missing, a shape differs, or tied weights do.
        """
        for alias, name in self.aliases.items():
            if alias in weights and name in weights and not torch.equal(weights[alias], weights[name]):
                raise WeightSyncError(f"tied weights differ: {name}, {alias}; the old weights stay")
        given = {self.aliases.get(name, name): tuple(tensor.shape) for name, tensor in weights.items()}
        kept = {name: self.shapes[name] for name in self.buffers if name not in given}
        check_shapes(self.shapes, {**kept, **given})

    def _given(self, tensors: Tensors, known: Mapping[str, Group]) -> list[Group]:
        """Returns the groups that tensors make up."""
        unknown = [name for name in tensors if name not in known]
        groups = list(dict.fromkeys(known[name] for name in tensors if name in known))
        sides = [group.memory if known is self._by_memory else group.hub for group in groups]
        missing = [name for side in sides for name in side if name not in tensors]
        _raise_problems({"unknown": unknown, "missing": missing})
        return groups


def of(model: PreTrainedModel) -> Naming:
    """Returns the naming of a model, made when it is first asked for; ask before sharding, and before adapters."""
    if model not in _made:
        _made[model] = Naming(model)
    return _made[model]


_made: WeakKeyDictionary[PreTrainedModel, Naming] = WeakKeyDictionary()


def to_hub(model: PreTrainedModel, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Returns a model's tensors as the hub names and holds them; see `Naming.to_hub`."""
    return of(model).to_hub(tensors)


def from_hub(model: PreTrainedModel, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Returns tensors of the hub as the model names and holds them; see `Naming.from_hub`."""
    return of(model).from_hub(tensors)


def groups(model: PreTrainedModel) -> list[Group]:
    """Returns every tensor of a model, by what converts together; see `Naming.groups`."""
    return of(model).groups


def hub_shapes(model: PretrainedConfig | PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight by its name on the hub, tied ones once, of a model or a configuration.

    A configuration's model is of the class that it names, or a causal language model; it takes no memory.
    """
    if isinstance(model, PreTrainedModel):
        return dict(of(model).shapes)
    kind = getattr(transformers, (model.architectures or [""])[0], None)
    with torch.device("meta"):
        empty = kind(deepcopy(model)) if kind else transformers.AutoModelForCausalLM.from_config(deepcopy(model))
    return Naming(empty).shapes


def check_shapes(expected: Shapes, given: Shapes) -> None:
    """Checks that the names and shapes of weights are those expected, before any is replaced.

    Raises:
        WeightSyncError: a name is unknown or missing, or a shape differs.
    """
    _raise_problems(
        {
            "unknown": sorted(set(given) - set(expected)),
            "missing": [name for name in expected if name not in given],
            "of another shape": [
                f"{name} {tuple(given[name])}, not {tuple(shape)}"
                for name, shape in expected.items()
                if name in given and tuple(given[name]) != tuple(shape)
            ],
        }
    )


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns a model's parameters and persistent buffers by name, tied ones once."""
    tensors = _tensors(model)
    return {name: tensors[name] for name, first in _firsts(tensors).items() if name == first}


@dataclass(frozen=True)
class _Conversion:
    """How a group converts in one direction.

    `patterns` holds the group's tensors, each with the pattern that its name matched; `target` is what the first
    tensor that comes out is called, or would be. Without a converter one tensor changes its name.
    """

    target: str
    patterns: dict[str, str | None]
    converter: WeightConverter | None

    def run(self, tensors: Tensors, model: _Shapes) -> dict[str, torch.Tensor]:
        """Returns the group converted."""
        if self.converter is None:
            (name,) = self.patterns
            return {self.target: tensors[name]}
        converter = deepcopy(self.converter)  # it collects tensors
        for name, pattern in self.patterns.items():
            converter.add_tensor(self.target, name, pattern, tensors[name].detach())
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _conversions(
    tensors: Tensors, transforms: list[WeightTransform], reverse: bool, **known: Any
) -> Iterable[_Conversion]:
    """Returns how each tensor converts, as loading and saving of transformers find it."""
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, _Conversion] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, reverse=reverse, **known)
        found.setdefault(target, _Conversion(target, {}, by_pattern.get(pattern))).patterns[name] = pattern
    return found.values()


@dataclass(frozen=True)
class _Shapes:
    """What conversions ask of a model: its configuration, and shapes of its parameters."""

    config: PretrainedConfig
    tensors: dict[str, torch.Tensor]

    def get_parameter(self, name: str) -> torch.Tensor:
        """Returns a parameter, empty."""
        return self.tensors[name]


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns a model's parameters and persistent buffers under every name they have."""
    left_out = set(model._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in left_out}


def _firsts(tensors: Tensors) -> dict[str, str]:
    """Returns for each name the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _raise_problems(problems: Mapping[str, list[str]]) -> None:
    for what, names in problems.items():
        if names:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            raise WeightSyncError(f"weights {what}: {', '.join(names[:NAMES_SHOWN])}{more}; the old weights stay")
