"""TensorBoard: one event file per attempt, so that steps repeated after a resume hide none of the earlier ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcli.config.schema import TrackerConfig
from rollcli.errors import PluginError
from rollcli.trackers.base import Warn


class TensorboardTracker:
    """Mirrors metrics into TensorBoard event files; `mode` and `project` mean nothing here."""

    def __init__(self, config: TrackerConfig, warn: Warn) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PluginError(
                "tracker `tensorboard` needs the package `tensorboard`", hint="pip install 'rollcli[tensorboard]'"
            ) from error
        self._open = SummaryWriter
        self._writer: Any = None

    def start(
        self, run_id: str, config: Mapping[str, Any], folder: Path, attempt: int, resume_step: int | None
    ) -> None:
        """Opens the mirror of this attempt."""
        self._writer = self._open(str(folder / f"attempt_{attempt}"), purge_step=resume_step)
        text = json.dumps({**config, "resume_step": resume_step}, indent=2, default=str)
        self._writer.add_text("config", f"    {text}".replace("\n", "\n    "), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Mirrors one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Sends what is left and closes."""
        if self._writer is not None:
            self._writer.close()
