"""Policy, reference and critic workers: one rank of a training engine in an actor."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from rollcli import registry
from rollcli.cluster.weight_sender import WeightSender
from rollcli.cluster.worker import Worker, WorkerSpec
from rollcli.config.schema import PolicyConfig, RlRecipe
from rollcli.data.batch import Batch
from rollcli.data.carriers import Task
from rollcli.data.templates import ChatFormat
from rollcli.engines.base import TrainEngine
from rollcli.engines.schedule import learning_rate


class TrainWorker(Worker):
    """One data-parallel rank of the policy, the reference or the critic."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.formats: dict[str, ChatFormat] = {}
        self.config: PolicyConfig = {
            "critic": lambda: self.recipe.critic,
            "reference": lambda: self.recipe.reference_workers,
        }.get(spec.role, lambda: self.recipe.policy)()
        import torch

        torch.set_num_threads(spec.threads)
        # Importing is most of a start; it overlaps with the other workers' before the ranks meet in `connect`.
        registry.resolve("train_engines", self.config.engine)

    def address(self) -> tuple[str, int]:
        """Returns a host and a free port where the ranks can meet."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def connect(self, host: str, port: int) -> None:
        """Joins the ranks and loads the model."""
        import torch
        import torch.distributed as dist

        from rollcli.engines.loading import torch_dtype
        from rollcli.engines.models import load_critic, load_policy

        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=self.spec.rank,
            world_size=self.spec.count,
        )
        engine = registry.resolve("train_engines", self.config.engine)
        model, seed = self.recipe.model, self.recipe.seed
        if self.spec.role == "critic":
            loaded = load_critic(model, self.config.path, device, seed)
        else:
            loaded = load_policy(model, device, seed, training=True)
        frozen = self.spec.role == "reference"
        self.engine: TrainEngine = engine(
            loaded, self.config, frozen=frozen, dtype=model.dtype, seed=seed, **self.config.engine_args
        )
        self.device, self.collective = device, None
        if self.spec.role == "policy" and isinstance(self.recipe, RlRecipe):
            self.sender = WeightSender(self.engine, self.recipe.rollout.sync, torch_dtype(model.dtype, device))

    def logprobs(self, batch: Batch, temperature: float, adapters: bool = True) -> np.ndarray:
        """Returns the log-probability of each trained token, float32 `[T]`; without adapters the reference's."""
        from rollcli.engines.objectives import LogProbs

        with self._adapters(adapters):
            return self.engine.forward(batch, LogProbs(temperature))

    def distribution(self, batch: Batch, temperature: float, adapters: bool = True) -> np.ndarray:
        """Returns the log-probabilities of the whole vocabulary at each trained token, float32 `[T, V]`."""
        from rollcli.engines.objectives import Distribution

        with self._adapters(adapters):
            return self.engine.forward(batch, Distribution(temperature))

    def _adapters(self, on: bool) -> AbstractContextManager[None]:
        return nullcontext() if on or not self.config.lora.rank else self.engine.without_adapter()

    def values(self, batch: Batch) -> np.ndarray:
        """Returns the critic's values, float32 `[T]`."""
        from rollcli.engines.objectives import Values

        return self.engine.forward(batch, Values())

    def update(
        self, shards: list[Batch], step: int, state: Mapping[str, Any], temperature: float
    ) -> list[tuple[dict[str, float], np.ndarray]]:
        """Takes one optimizer step for each minibatch, on this rank's share of it.

        Args:
            shards: this rank's part of each minibatch.
            step: the run's step, from 0, which decides the learning rate.
            state: the algorithm's state.
            temperature: at which the samples were drawn.

        Returns:
            For each minibatch its metrics, and the log-probabilities (the critic: values) `[T]` before its update.
        """
        from rollcli.engines.objectives import LogProbs, Values

        algorithm = self.recipe.algorithm
        algorithm.restore(state)
        objective = Values(algorithm) if self.spec.role == "critic" else LogProbs(temperature, algorithm)
        rate = learning_rate(self.config.optimizer, step, self.recipe.steps)
        return [self.engine.update(shard, objective, rate) for shard in shards]

    def demonstrations(self, tasks: list[Task]) -> Batch:
        """Returns tasks with a demonstration as a batch, by each task's chat template."""
        from rollcli.engines.models import load_chat_formats

        if not self.formats:
            self.formats = load_chat_formats(self.recipe)
        every_turn = getattr(self.recipe, "loss_on", "answer") == "turns"
        sequences, images = [], []
        for task in tasks:
            chat = self.formats[task.name]
            sequences.append(chat.demonstration(task.messages, task.payload["response"], every_turn))
            images.append(chat.images(task.messages))
        return Batch.from_sequences(sequences, images)

    def begin_weights(self, whole: bool) -> None:
        """Starts to hand out the weights; all ranks are called, rank 0 has them."""
        self.sender.begin(whole)

    def next_bucket(self) -> tuple[dict[str, Any] | None, Any]:
        """Returns the next bucket of weights, and what is known of it."""
        return self.sender.next()

    def lend_bucket(self) -> tuple[dict[str, Any] | None, Any]:
        """Returns the next bucket as handles on this GPU's memory, and what is known of it."""
        return self.sender.lend()

    def join_weights(self, host: str, port: int, size: int, rank: int) -> None:
        """Joins the members between whom weights are broadcast."""
        from rollcli.cluster.collective import Collective

        self.collective = Collective(host, port, size, rank, self.device)

    def broadcast_weights(self) -> None:
        """Sends all buckets to the other members."""
        self.sender.broadcast(self.collective)

    def offload(self) -> None:
        """Leaves the device to sampling."""
        self.engine.offload()

    def onload(self) -> None:
        """Takes the device back."""
        self.engine.onload()

    def model_seconds(self) -> float:
        """Returns the seconds spent in the model so far: forward, backward, optimizer."""
        return self.engine.model_time.seconds

    def save(self, folder: str) -> None:
        """Writes this rank's part of a checkpoint; rank 0 adds the tokenizer, so that the model folder is complete."""
        self.engine.save(Path(folder))
        if self.spec.rank == 0:
            from rollcli.engines.models import load_policy_tokenizer, load_vision_format

            load_policy_tokenizer(self.recipe.model).save_pretrained(Path(folder) / "model")
            if (vision := load_vision_format(self.recipe.model)) is not None:
                vision.processor.save_pretrained(Path(folder) / "model")

    def load(self, folder: str) -> None:
        """Restores a checkpoint."""
        self.engine.load(Path(folder))
