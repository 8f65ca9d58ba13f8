"""Rollout engines with one planted fault each, named in a recipe as `faulty.py:Class`. All wrap the real one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rollcli.engines.base import Completion, GenerateRequest
from rollcli.engines.models import load_policy
from rollcli.engines.transformers import TransformersEngine


class Wrapped:
    """The real engine behind the protocol alone: its weights cannot be read."""

    def __init__(self, model: Any, **options: Any) -> None:
        self._inner = TransformersEngine(model, **options)
        self._sequences: dict[str, GenerateRequest] = {}

    @classmethod
    def load(cls, config: Any, *, device: Any, seed: int, max_rows: int, parallel: Any, **options: Any) -> Wrapped:
        return cls(load_policy(config, device, seed), max_rows=max_rows, **options)

    @property
    def version(self) -> int:
        return self._inner.version

    @property
    def pending(self) -> int:
        return self._inner.pending

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        self._sequences |= {request.id: request for request in requests}
        self._inner.add(requests)

    def abort(self, ids: Iterable[str]) -> None:
        self._inner.abort(ids)

    def step(self) -> list[Completion]:
        return [self.changed(completion) for completion in self._inner.step()]

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._inner.load_weights(weights, version)

    def changed(self, completion: Completion) -> Completion:
        """Returns what is reported of a completion."""
        return completion

    def logits(self, completion: Completion) -> torch.Tensor:
        """Returns the model's logits at each sampled token, `[N, V]`, by a plain forward pass."""
        import transformers

        prompt = self._sequences[completion.id].prompt
        model = self._inner.model
        plain = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        plain.set_attn_implementation("eager")
        plain.load_state_dict(model.state_dict())
        ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            return plain.eval()(input_ids=ids).logits[0, len(prompt) - 1 : -1]


def _of_tokens(logits: torch.Tensor, completion: Completion) -> Completion:
    tokens = torch.from_numpy(completion.tokens.astype(np.int64))[:, None]
    return replace(completion, logprobs=logits.log_softmax(-1).gather(-1, tokens)[:, 0].numpy())


class IgnoresTemperature(Wrapped):
    """Reports at temperature 1 what was sampled at another."""

    def changed(self, completion: Completion) -> Completion:
        return _of_tokens(self.logits(completion), completion)


class Renormalizes(Wrapped):
    """Reports log-probabilities after top-k."""

    def changed(self, completion: Completion) -> Completion:
        sampling = self._sequences[completion.id].sampling
        logits = self.logits(completion) / sampling.temperature
        smallest = logits.topk(sampling.top_k).values[:, -1:]
        return _of_tokens(logits.masked_fill(logits < smallest, -torch.inf), completion)


class Half(Wrapped):
    """Computes in bfloat16 whatever it was asked for."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model.bfloat16(), **options)


class ExtraToken(Wrapped):
    """Puts the tokenizer's first special token before every prompt, as an engine that is handed text does."""

    TOKEN = 0

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        extra = np.array([self.TOKEN], dtype=np.int32)
        super().add([replace(request, prompt=np.concatenate([extra, request.prompt])) for request in requests])


class Shifted(Wrapped):
    """Gives each token the log-probability of the one before."""

    def changed(self, completion: Completion) -> Completion:
        return replace(completion, logprobs=np.roll(completion.logprobs, 1))


class Mixed(Wrapped):
    """Returns the log-probabilities of all answers in the wrong order."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._held: list[Completion] = []

    @property
    def pending(self) -> int:
        return self._inner.pending + len(self._held)

    def step(self) -> list[Completion]:
        self._held += self._inner.step()
        if self._inner.pending:
            return []
        held, self._held = self._held, []
        by_length: dict[int, list[Completion]] = {}
        for completion in held:
            by_length.setdefault(len(completion.tokens), []).append(completion)
        return [
            replace(one, logprobs=other.logprobs)
            for same in by_length.values()
            for one, other in zip(same, [*same[1:], same[0]])
        ]


class Stale(Wrapped):
    """Keeps one tensor of the weights it was made with, which are not the trainer's."""

    NAME = "model.layers.1.mlp.up_proj.weight"

    @property
    def model(self) -> Any:
        return self._inner.model

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        with torch.no_grad():
            old = dict(model.named_parameters())[self.NAME]
            old += 0.02 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        kept = dict(self._inner.model.named_parameters())[self.NAME].detach().clone()
        super().load_weights({**weights, self.NAME: kept}, version)


class Corrupts(Wrapped):
    """Takes what the trainer hands over wrongly, and cannot be looked into."""

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        super().load_weights({name: tensor * 1.05 for name, tensor in weights.items()}, version)


class Crowded(Wrapped):
    """Is wrong when it has more than one request."""

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        self._crowd = len(requests) > 1
        super().add(requests)

    def changed(self, completion: Completion) -> Completion:
        return replace(completion, logprobs=completion.logprobs * (1.1 if self._crowd else 1.0))


class Strange(Wrapped):
    """Is wrong for no reason that anybody thought of."""

    def changed(self, completion: Completion) -> Completion:
        noise = np.random.default_rng(0).normal(0, 0.5, len(completion.logprobs))
        return replace(completion, logprobs=(completion.logprobs + noise).astype(np.float32))


class Refuses(Wrapped):
    """Answers nothing."""

    def changed(self, completion: Completion) -> Completion:
        return replace(completion, tokens=completion.tokens[:0], stop_reason="error", error="out of blocks")
