"""The one forward pass of engines around a `transformers` model: the places asked for, however rows are laid out.

With real models it runs in test_fsdp.py, test_deepspeed.py and test_train_contract.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rollcli.config.schema import PolicyConfig
from rollcli.engines.hub_model import HubModelEngine


class Model(torch.nn.Module):
    """Outputs `[id, position]` for each token; computes them at `logits_to_keep` alone where that is given."""

    def __init__(self, attention: str = "sdpa") -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=attention)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, input_ids, position_ids, use_cache, logits_to_keep=None):
        outputs = torch.stack([input_ids, position_ids], dim=-1).half()
        self.shapes.append(tuple(outputs.shape if logits_to_keep is None else outputs[:, logits_to_keep].shape))
        return SimpleNamespace(logits=outputs if logits_to_keep is None else outputs[:, logits_to_keep])


class Critic(Model):
    def forward(self, input_ids, position_ids, use_cache):
        return super().forward(input_ids, position_ids, use_cache)


IDS = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]])
POSITIONS = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
ROWS, COLUMNS = np.array([0, 1, 1]), np.array([3, 1, 3])


@pytest.fixture
def engine(monkeypatch) -> HubModelEngine:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    return HubModelEngine(PolicyConfig(), torch.device("cpu"), frozen=True)


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("kind", [Model, Critic])
def test_outputs_are_those_of_the_places_asked_for(engine, kind, attention):
    engine.model = kind(attention)
    engine.prepare(engine.model)
    found = engine.predict(IDS, POSITIONS, ROWS, COLUMNS)
    assert found.dtype is torch.float32 and found.tolist() == [[14, 1], [22, 1], [24, 3]]
    one_row, selects = attention != "sdpa", kind is Model
    assert (engine.one_row, engine.selects) == (one_row, selects)
    # Two columns of two rows, or three places of one row; a critic computes all.
    shapes = {(True, False): (2, 2, 2), (True, True): (1, 3, 2), (False, False): (2, 4, 2), (False, True): (1, 8, 2)}
    assert engine.model.shapes == [shapes[selects, one_row]]


def test_of_no_place_the_outputs_are_empty_and_the_model_has_run(engine):
    engine.model = Model()
    engine.prepare(engine.model)
    nothing = np.zeros(0, np.int64)
    assert engine.predict(IDS, POSITIONS, nothing, nothing).shape == (0, 2) and engine.model.shapes == [(2, 1, 2)]


def test_activations_are_recomputed_where_the_recipe_says_so(engine):
    asked: list[dict] = []
    engine.model = Model()
    engine.model.gradient_checkpointing_enable = asked.append
    engine.prepare(engine.model.eval())
    assert asked == [] and engine.model.training
    engine.config.recompute_activations = True
    engine.prepare(engine.model)
    assert asked == [{"use_reentrant": False}]
