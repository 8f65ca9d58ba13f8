"""Engines that train a model as `transformers` made it, whatever puts it into parts around that: one forward pass."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rollcli.engines.naming import Naming
from rollcli.engines.training import TrainingEngine


class HubModelEngine(TrainingEngine):
    """Base of engines whose forward pass is the model's own.

    Attributes:
        model: what computes the forward pass: the model, in parts or not, or what an engine put around it.
        naming: the model's, from before it got adapters and was put into parts.
        selects: whether the model computes outputs only where asked: a language model does, a critic has one value
            everywhere.
        one_row: whether rows are laid out as one: flash attention tells packed sequences apart in a single row only,
            the other kinds work less on short rows.
    """

    model: Any
    naming: Naming

    def prepare(self, model: PreTrainedModel) -> None:
        """Sets a model up for training, and keeps how it takes rows; called before it is put into parts."""
        model.train()
        if self.config.recompute_activations:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.selects = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.one_row = "flash" in (model.config._attn_implementation or "")

    def predict(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: np.ndarray, columns: np.ndarray, **images: torch.Tensor
    ) -> torch.Tensor:
        """Returns the outputs at the places asked for; a language model computes its logits only in their columns."""
        if self.one_row:
            rows, columns = np.zeros_like(rows), rows * ids.shape[1] + columns
            ids, positions = ids.reshape(1, -1), positions.reshape(*positions.shape[:-2], 1, -1)
        return self.outputs_at(ids, positions, rows, columns, dict(images))

    def outputs_at(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: np.ndarray, columns: np.ndarray, options: dict[str, Any]
    ) -> torch.Tensor:
        """Returns the model's float32 outputs at places of rows as it takes them; `options` go to the model."""
        if self.selects:
            kept = np.unique(columns) if len(columns) else np.array([0])
            columns = np.searchsorted(kept, columns)
            options["logits_to_keep"] = self._tensor(kept)
        with self.model_time:
            output = self.model(input_ids=ids, position_ids=positions, use_cache=False, **options)
        return output.logits[self._tensor(rows), self._tensor(columns)].float()
