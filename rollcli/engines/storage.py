"""Tensors on disk: safetensors only, models in the hub's layout so that any tool can load them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from rollcli.errors import CheckpointError


def save_model(model: PreTrainedModel, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes configuration and weights (in files of at most 5 GB) as `transformers`, and other engines, read them.

    Args:
        model: carries the configuration, which says its class and the precision of `weights`.
        weights: in the hub's naming (engines/naming.py), tied ones once.
        folder: made where it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP makes a class of its own of a model's
    config.dtype = next(iter(weights.values())).dtype
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:  # a critic has none
        # `save_pretrained` refuses settings that public models come with, such as a temperature without sampling.
        model.generation_config.to_json_file(folder / "generation_config.json")
    own = {name: _own(tensor) for name, tensor in weights.items()}
    save_torch_state_dict(own, folder, max_shard_size="5GB", metadata={"format": "pt"})


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the CPU with a storage that holds nothing else, or the writer refuses it.

    What is gathered from ranks that do not divide its first dimension is a view of something longer.
    """
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes one safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: _own(tensor) for name, tensor in tensors.items()}, path, metadata)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of one file, or of every `*.safetensors` file of a folder.

    Raises:
        CheckpointError: a file is not there, or cannot be read.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"`{file}` cannot be read: {error}", hint="resume from another step with `--step`"
            ) from error
    return tensors


def checksum(tensor: torch.Tensor) -> int:
    """Returns a CRC-32 of a tensor's shape and values.

    Equal values have equal sums in whatever precision they lie: a rollout engine in bfloat16 may hold a router's
    weights in float32, and reads -0.0 from some kernels as 0.0.
    """
    host = tensor.detach().cpu().contiguous()
    if host.is_floating_point():
        host = host.float() + 0.0  # -0.0 + 0.0 is 0.0
    return zlib.crc32(host.reshape(-1).view(torch.uint8).numpy(), zlib.crc32(str(list(host.shape)).encode()))
