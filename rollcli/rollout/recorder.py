"""Writes down one episode as it plays: what the model saw, what it sampled, turn by turn."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from rollcli.data.carriers import Task, Trajectory
from rollcli.data.images import Images, joined
from rollcli.engines.base import Completion


class TrajectoryRecorder:
    """Columns of one trajectory, grown by observed and sampled tokens."""

    def __init__(self, task: Task, sample: int) -> None:
        self.task = task
        self.sample = sample
        self._tokens: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self.turns: list[tuple[int, int]] = []
        self.images: Images | None = None
        self.length = 0
        self.sampled_length = 0

    @property
    def tokens(self) -> np.ndarray:
        """Everything so far, int32 `[T]`: the next turn's prompt."""
        return np.concatenate(self._tokens) if self._tokens else np.zeros(0, dtype=np.int32)

    def ends_with(self, ids: Collection[int]) -> bool:
        """Returns whether the last token is one of these."""
        last = self._tokens[-1] if self._tokens else ()
        return len(last) > 0 and int(last[-1]) in ids

    def observe(self, ids: np.ndarray, images: Images | None = None) -> None:
        """Adds tokens the model did not sample: no loss on them; and the images that they show."""
        self.images = joined([self.images, images])
        count = len(ids)
        self._append(ids, np.zeros(count, bool), np.zeros(count, np.float32), np.full(count, -1, np.int32))

    def take(self, completion: Completion) -> None:
        """Adds one sampled turn."""
        count = len(completion.tokens)
        self.turns.append((self.length, self.length + count))
        self.sampled_length += count
        self._append(completion.tokens, np.ones(count, bool), completion.logprobs, completion.versions)

    def trajectory(self, stop_reason: str, prompt_text: str, response_text: str) -> Trajectory:
        """Returns the finished trajectory, not scored yet."""
        return Trajectory(
            task_id=self.task.id,
            sample=self.sample,
            tokens=self.tokens,
            loss_mask=_joined(self._mask, bool),
            logprobs=_joined(self._logprobs, np.float32),
            versions=_joined(self._versions, np.int32),
            turns=list(self.turns),
            stop_reason=stop_reason,
            prompt_text=prompt_text,
            response_text=response_text,
            images=self.images,
        )

    def _append(self, ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self._tokens.append(np.asarray(ids, dtype=np.int32))
        self._mask.append(mask)
        self._logprobs.append(logprobs)
        self._versions.append(versions)
        self.length += len(ids)


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
