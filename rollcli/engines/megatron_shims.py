"""What lets Megatron-Core run where there is no CUDA: real arithmetic over gloo, for tests and small models.

Megatron asks CUDA for three things that no CPU has: the device new tensors go to, waiting for the device, and the
state of random generators (for dropout, which is always off here). Each gets an answer that means "the CPU". None
of it is replaced on a machine with CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class NoRandomness:
    """Stands for Megatron's tracker of CUDA random states: there are none to switch between."""

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        """Changes nothing."""
        yield

    def get_states(self) -> dict[str, torch.Tensor]:
        """Returns none."""
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Sets none."""


def prepare() -> None:
    """Makes Megatron-Core compute on the CPU of this process; on a machine with CUDA seeds its random states.

    Every random draw in Megatron's layers is a dropout of rate 0, so the seed decides nothing.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine 0.16.1 looks for this name, which only its import defines, in the router of a mixture.
    vars(moe_utils).setdefault("te_general_gemm", None)
    if torch.cuda.is_available():
        random.model_parallel_cuda_manual_seed(0)
        return
    torch.cuda.current_device = _cpu  # where layers and collectives allocate
    torch.cuda.synchronize = _nothing  # after a collective
    random._CUDA_RNG_STATE_TRACKER = NoRandomness()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = _nothing  # saved and restored around a layer whose activations are recomputed
    random._set_cuda_rng_state = _nothing


def _cpu() -> torch.device:
    return torch.device("cpu")


def _nothing(*arguments: Any, **options: Any) -> None:
    """Answers None to a question about CUDA."""
