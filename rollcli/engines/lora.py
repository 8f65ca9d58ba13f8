"""Low-rank adapters that are trained in place of all weights (LoRA, arXiv 2106.09685), by the package `peft`.

A linear layer of weight W `[out, in]` computes with W + alpha/rank · B · A, where A `[rank, in]` starts at random and B
`[out, rank]` at 0, so that a model with new adapters is the model without. The base weights do not change: with its
adapters switched off a policy is its own reference.

Which models: adapters go on linear layers (`nn.Linear`, and GPT-2's `Conv1D`) that are one tensor on the hub too. The
experts of a mixture are not, and get none; its attention does, and what else of it is linear, unless peft takes that
for experts. Tied embeddings do not matter unless the output head itself is named, which is refused then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollcli.config.schema import LoraConfig
from rollcli.engines import naming
from rollcli.engines.loading import HEADS
from rollcli.engines.storage import load_tensors, save_tensors
from rollcli.errors import CheckpointError, EngineError
from rollcli.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "default"
"""What peft calls the one adapter of a model."""
PREFIX = "base_model.model."
"""Stands before every name of an adapter file."""
FOLDER = "adapter"
"""Where a checkpoint holds adapters."""
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class LowRank:
    """A change of a weight `[out, in]`: scale · b · a.

    Attributes:
        a: `[rank, in]`.
        b: `[out, rank]`.
        scale: alpha / rank.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


def merge(base: torch.Tensor, change: LowRank) -> torch.Tensor:
    """Returns a weight with its change, computed in float32, in the weight's precision."""
    return (base.float() + change.scale * (change.b.float() @ change.a.float())).to(base.dtype)


@dataclass(frozen=True)
class Layer:
    """A linear layer with an adapter.

    Attributes:
        weight: name in memory, without adapters, of the weight that the adapter changes.
        a, b: names of the adapter's parameters.
        scale: alpha / rank.
        transposed: the weight is `[in, out]`, as GPT-2 holds it.
    """

    weight: str
    a: str
    b: str
    scale: float
    transposed: bool

    def low_rank(self, a: torch.Tensor, b: torch.Tensor) -> LowRank:
        """Returns the change of the weight, from its adapter's parameters."""
        return LowRank(b.T, a.T, self.scale) if self.transposed else LowRank(a, b, self.scale)


def wrap(model: PreTrainedModel, config: LoraConfig, seed: int) -> PreTrainedModel:
    """Puts adapters into a model, in place, and freezes everything else but a critic's head; returns the model.

    Args:
        model: whole, on its device, not sharded.
        config: the recipe's `lora` block.
        seed: decides A, the same on every rank and kind of device.

    Raises:
        EngineError: `peft` is not installed; the model has no such layers, or they can have no adapter.
    """
    peft = _peft()
    names = naming.of(model)  # before the adapters change what the model calls its weights
    targets = _targets(model, config)
    problem = next((target for target in targets if f"{target}.weight" not in _plain_weights(names)), None)
    if problem is not None:
        raise EngineError(
            f"`lora.targets`: `{problem}` cannot have an adapter: on the hub its weight is part of another",
            hint="leave it out",
        )
    peft.inject_adapter_in_model(_peft_config(peft, model, config, targets), model, NAME)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                drawn = torch.empty(parameter.shape)
                torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                parameter.copy_(drawn)
            elif ".lora_B." in name:
                parameter.zero_()
            if name in HEADS:
                parameter.requires_grad_(True)
    return model


def layers(model: PreTrainedModel) -> list[Layer]:
    """Returns a model's layers with adapters; none without."""
    return [
        Layer(
            weight=f"{name}.weight",
            a=f"{name}.lora_A.{NAME}.weight",
            b=f"{name}.lora_B.{NAME}.weight",
            scale=float(module.scaling[NAME]),
            transposed=bool(module.fan_in_fan_out),
        )
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    ]


def base_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns parameters and persistent buffers, without adapters, by the names that they have without adapters."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in naming.tensors_of(model).items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def trained_tensors(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Returns what is trained, adapters and a critic's head, by the names that peft has for them in files."""
    return {
        PREFIX + name.replace(f".{NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Switches the adapters off: the model computes as its base does."""
    modules = [module for module in model.modules() if hasattr(module, "lora_A")]
    _switch(modules, on=False)
    try:
        yield
    finally:
        _switch(modules, on=True)


def save(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes adapters as `peft.PeftModel.from_pretrained` reads them.

    Args:
        tensors: what `trained_tensors` returned, whole.
        folder: made where it is not there.
    """
    save_tensors(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = deepcopy(model.peft_config[NAME])
    config.base_model_name_or_path = model.config._name_or_path or None
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    config.modules_to_save = _heads(model) or None  # not when adapters are made: peft would make a copy beside each
    config.save_pretrained(folder)


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Returns what `save` wrote.

    Raises:
        CheckpointError: there are no adapters.
    """
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"checkpoint `{folder.parent}` has no adapters: it is of a run that trained all weights",
            hint="start from its model (`model.path`), or resume it without `policy.lora`",
        )
    return load_tensors(folder / WEIGHTS)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise EngineError("`lora.rank` needs the package peft", hint="pip install 'rollcli[lora]'") from error
    return peft


def _peft_config(peft: Any, model: PreTrainedModel, config: LoraConfig, targets: list[str]) -> Any:
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        task_type="TOKEN_CLS" if _heads(model) else "CAUSAL_LM",
        fan_in_fan_out=_is_transposed(model.get_submodule(targets[0])),
    )


def _heads(model: PreTrainedModel) -> list[str]:
    """Returns the modules of a critic's head."""
    return sorted({name.partition(".")[0] for name, _ in model.named_parameters() if name in HEADS})


def _targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Returns the modules that get adapters."""
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or _is_transposed(module)
    }
    head = model.get_output_embeddings()
    heads = {name for name, module in linear.items() if module is head or f"{name}.weight" in HEADS}
    targets: list[str] = []
    for wanted in config.targets:
        if wanted == "all-linear":
            found = [name for name in _unmistaken(model, linear) if name not in heads]
        else:
            found = [name for name in linear if f".{name}".endswith(f".{wanted}")]
            _check_target(model, wanted, found, linear)
        targets += found
    return list(dict.fromkeys(targets))


def _check_target(model: PreTrainedModel, wanted: str, found: list[str], linear: Iterable[str]) -> None:
    kind = model.config.model_type
    if not found:
        kinds = sorted({name.rpartition(".")[2] for name in linear})
        meant = did_you_mean(wanted, kinds)
        raise EngineError(
            f"`lora.targets`: a `{kind}` model has no linear layer `{wanted}`",
            hint=(f"did you mean `{meant}`? " if meant else "")
            + f"it has {', '.join(kinds)}; `all-linear` is all of them but the output head",
        )
    if set(found) - set(_unmistaken(model, found)):
        raise EngineError(
            f"`lora.targets`: peft takes `{wanted}` of a `{kind}` model for its experts, which get no adapters here",
            hint="name layers of the attention only, or write `all-linear`, which leaves out what cannot have one",
        )
    for name in found:
        if f"{name}.weight" in naming.of(model).aliases:
            raise EngineError(
                f"`lora.targets`: `{wanted}` of this model is its embedding (they are tied), which gets no adapter",
                hint="leave it out",
            )


def _unmistaken(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Returns the layers among `names` that peft does not take for experts of a mixture, which were called alike."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    names = list(names)
    kept = set()
    for kind in sorted({name.rpartition(".")[2] for name in names}):
        probe = _peft().LoraConfig(target_modules=[kind])
        try:
            convert_peft_config_for_transformers(probe, model, None)
        except ValueError:  # one part of a fused tensor alone
            continue
        kept |= set(probe.target_modules)
    return [name for name in names if name.rpartition(".")[2] in kept]


def _plain_weights(names: naming.Naming) -> set[str]:
    """Returns the tensors in memory that are one tensor of the same shape on the hub."""
    return {group.memory[0] for group in names.groups if group.plain}


def _is_transposed(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _switch(modules: list[Any], on: bool) -> None:
    for module in modules:
        module.enable_adapters(on)
        for part in (module.lora_A, module.lora_B):
            # peft would freeze them; FSDP remembers for good whether a parameter had a gradient at first.
            part.requires_grad_(True)
