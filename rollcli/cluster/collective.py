"""A broadcast from the policy's first rank to the rollout replicas, over gloo or NCCL.

It is a process group of its own: the default one of a process belongs to its engine. What is sent is any value; its
arrays travel as bytes, in one piece, without being copied into the description of the rest.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=120)
"""How long a member waits for the others; a member that dies is noticed at once."""


class Collective:
    """One member. All construct theirs at the same time; the first one's process is the meeting place.

    Args:
        host: of the first member.
        port: a free one there.
        size: number of members.
        rank: 0 sends, all others receive.
        device: where NCCL finds its buffers; gloo serves a CPU.

    Raises:
        RuntimeError: the members did not meet in time.
    """

    def __init__(self, host: str, port: int, size: int, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=LIMIT)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = LIMIT
            self.group = dist.ProcessGroupNCCL(dist.PrefixStore("weights", self.store), rank, size, options)
        else:
            self.group = dist.ProcessGroupGloo(dist.PrefixStore("weights", self.store), rank, size, LIMIT)

    def send(self, value: Any) -> None:
        """Sends a value to every other member."""
        buffers: list[pickle.PickleBuffer] = []
        described = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        arrays = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
        sizes = np.array([len(described), len(arrays)], dtype=np.int64)
        self._broadcast(sizes.view(np.uint8))
        self._broadcast(np.array([array.size for array in arrays], dtype=np.int64).view(np.uint8))
        self._broadcast(np.frombuffer(described, dtype=np.uint8))
        self._broadcast(np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint8))

    def receive(self) -> Any:
        """Returns the next value sent; its arrays share one buffer.

        The value comes from a worker of the same run, whose code this process runs as well: it is not of foreign
        origin.
        """
        described, count = (int(number) for number in self._receive(16).view(np.int64))
        sizes = self._receive(8 * count).view(np.int64)
        words = self._receive(described)
        body = memoryview(self._receive(int(sizes.sum())))
        ends = np.cumsum(sizes)
        return pickle.loads(words.tobytes(), buffers=[body[end - size : end] for end, size in zip(ends, sizes)])

    def _receive(self, length: int) -> np.ndarray:
        return self._broadcast(np.zeros(length, dtype=np.uint8))

    def _broadcast(self, content: np.ndarray) -> np.ndarray:
        if not content.size:
            return content
        tensor = torch.from_numpy(content if content.flags.writeable else content.copy()).to(self.device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([tensor], options).wait()
        return tensor.cpu().numpy()
