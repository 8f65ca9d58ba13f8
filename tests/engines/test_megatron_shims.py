"""What Megatron is told where there is no CUDA, in a process of its own, since it holds for the whole process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("megatron.core")

from rollcli.engines.megatron_shims import NoRandomness

CHECK = """
import rollcli, torch
from rollcli.engines import megatron_shims
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils
megatron_shims.prepare()
megatron_shims.prepare()
assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
torch.cuda.synchronize()
assert isinstance(random.get_cuda_rng_tracker(), megatron_shims.NoRandomness)
x = torch.ones(3, requires_grad=True)
state = torch.get_rng_state()
random.checkpoint(lambda t: t * t, False, x).sum().backward()
assert x.grad.tolist() == [2, 2, 2] and torch.equal(state, torch.get_rng_state())
weight, tokens = torch.eye(2, requires_grad=True), torch.tensor([[1.0, 2.0]])
assert moe_utils.router_gating_linear(tokens, weight, None, torch.float32).tolist() == [[1, 2]]
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA, so nothing is replaced")
def test_megatron_computes_on_the_cpu() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CHECK], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_forking_changes_no_random_state() -> None:
    tracker, state = NoRandomness(), torch.get_rng_state()
    with tracker.fork("any"):
        assert torch.equal(state, torch.get_rng_state())
    tracker.set_states({"any": state})
    assert tracker.get_states() == {} and torch.equal(state, torch.get_rng_state())
