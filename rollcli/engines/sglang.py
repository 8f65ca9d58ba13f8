"""Rollout engine on SGLang's offline engine, whose scheduler and model run in processes of their own.

    add ──▶ waiting ──at most max_rows──▶ async_generate, one coroutine each ──chunks──▶ completions

SGLang goes on sampling between two steps, so a change of weights first ends what is under way, takes the tokens that
the old weights sampled, and afterwards starts anew from there: tokens stay, their keys and values do not.

SGLang needs a GPU: what is tested is this module with a stand-in for SGLang's engine, and nothing of it was run with
the real one. Log-probabilities there are those after temperature and before top-p; with `min_tokens` they are of the
distribution without the stop tokens, which is not what the other engines report. Draws depend on seed and position, as
the contract wants, but are others than those of `transformers` and `vllm`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers

from rollcli.engines import loading, naming
from rollcli.engines.base import Completion, GenerateRequest
from rollcli.engines.facts import check_options
from rollcli.engines.requests import Answer, Decode, decoder, refusal, stop_text_ends, without_tokens
from rollcli.engines.storage import checksum
from rollcli.engines.vision import check_none
from rollcli.errors import EngineError
from rollcli.runs.locations import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollcli.config.schema import ModelConfig, ParallelConfig


class SglangEngine:
    """Generates with an SGLang engine that it owns; see `InferEngine` for the contract.

    Args:
        engine: `sglang.Engine`, made with the options that `load` gives it.
        model: the same model in transformers, on the meta device; names and shapes of the weights are its.
        max_rows: most requests that run at once.
        max_context: most tokens of prompt and answer together.
        version: policy version of the weights.
        decode: returns the text of tokens; without it, requests with stop texts are refused.
    """

    def __init__(
        self, engine: Any, model: PreTrainedModel, *, max_rows: int, max_context: int, version: int = 0,
        decode: Decode | None = None,
    ) -> None:  # fmt: skip
        self.max_rows = max_rows
        self.max_context = max_context
        self.version = version
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop = engine.loop
        self._chunks: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._naming = naming.of(model)
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self._decode = decode
        self._waiting: deque[Answer] = deque()
        self._running: dict[str, tuple[Answer, asyncio.Task[None], int]] = {}
        self._done: list[Completion] = []
        self._ids: set[str] = set()
        self._checksums: dict[str, int] = {}
        self._stats = {"prefill_tokens": 0, "sampled_tokens": 0, "steps": 0, "model_s": 0.0, "busy_s": 0.0}

    @classmethod
    def load(
        cls, config: ModelConfig, *, device: torch.device, seed: int, max_rows: int, parallel: ParallelConfig,
        **options: Any,
    ) -> SglangEngine:  # fmt: skip
        """Returns an engine for the recipe's model; options are fields of SGLang's `ServerArgs`.

        Raises:
            EngineError: SGLang is not installed, does not know an option, or the model starts from random weights.
        """
        try:
            import sglang
        except ImportError as error:  # also raised where CUDA's libraries are missing
            raise EngineError(
                f"the rollout engine `sglang` is not installed, or has no GPU here ({error})",
                hint="install it with `pip install 'rollcli[sglang]'` on a machine with a GPU",
            ) from error
        check_options("sglang", options, "rollout")
        if config.initialize is not None:
            raise EngineError("the rollout engine `sglang` reads a checkpoint, and `model.initialize` has none")
        path = resolve_model(config.path)
        hub_config = transformers.AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=False)
        check_none(hub_config, "sglang")
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(hub_config)
        given = {
            "model_path": path, "revision": config.revision, "skip_tokenizer_init": True, "random_seed": seed,
            "dtype": str(loading.torch_dtype(config.dtype, device)).removeprefix("torch."),
            "max_running_requests": max_rows, "tp_size": parallel.tensor, "pp_size": parallel.pipeline,
            "ep_size": parallel.expert, "enable_memory_saver": True, "enable_deterministic_inference": True,
            "log_level": "error",
        }  # fmt: skip
        context = options.get("context_length") or hub_config.get_text_config().max_position_embeddings
        engine = sglang.Engine(**(given | options))
        return cls(engine, model, max_rows=max_rows, max_context=context, decode=decoder(config))

    @property
    def pending(self) -> int:
        """Requests queued or running, and completions that the next `step` will return."""
        return len(self._waiting) + len(self._running) + len(self._done)

    def stats(self) -> dict[str, float]:
        """Counters since the start; `steps` are calls of `step`, `model_s` is time spent waiting for tokens."""
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
        for answer in [*self._waiting, *(running[0] for running in self._running.values())]:
            if answer.request.id in ids:
                self._stop(answer.request.id)
                self._end(answer, "abort")
        self._waiting = deque(answer for answer in self._waiting if answer.request.id in self._ids)

    def step(self) -> list[Completion]:
        """Waits until some running request has new tokens; returns what finished, and parts of streamed requests."""
        began = time.perf_counter()
        while self._waiting and len(self._running) < self.max_rows:
            self._submit(self._waiting.popleft())
        if self._running and not self._done:
            self._stats["steps"] += 1
            self._take(*self._loop.run_until_complete(self._chunks.get()))
            self._stats["model_s"] += time.perf_counter() - began
        while not self._chunks.empty():
            self._take(*self._chunks.get_nowait())
        done, self._done = self._done, []
        self._stats["busy_s"] += time.perf_counter() - began
        return done

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every weight by its hub name; of tied ones only the first."""
        return dict(self._naming.shapes)

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replaces every weight and drops cached prefixes; requests in flight are prefilled anew.

        Raises:
            WeightSyncError: a name is unknown or missing, or a shape differs; the old weights stay.
            EngineError: SGLang did not take the weights.
        """
        self._naming.check(weights)
        firsts = {self._naming.aliases.get(name, name): tensor.detach() for name, tensor in weights.items()}
        self._requeue()
        taken, message = self._engine.update_weights_from_tensor(list(firsts.items()))[:2]
        if not taken:
            raise EngineError(f"SGLang did not take weights of version {version}: {message}")
        self._engine.flush_cache()
        self._checksums = {name: checksum(tensor) for name, tensor in firsts.items()}
        self.version = version

    def checksums(self) -> dict[str, int]:
        """Returns `storage.checksum` of every weight as `load_weights` received it: SGLang's own are not readable."""
        return dict(self._checksums)

    def offload(self) -> None:
        """Frees the GPU of weights and KV cache; requests in flight are prefilled anew afterwards."""
        self._requeue()
        self._engine.release_memory_occupation()

    def onload(self) -> None:
        """Takes the GPU back; weights are undefined until `load_weights`."""
        self._engine.resume_memory_occupation()

    def _submit(self, answer: Answer) -> None:
        request = answer.remaining() if answer.tokens else answer.request
        task = self._loop.create_task(self._follow(request))
        task.add_done_callback(lambda ended: self._report(request.id, ended))
        self._running[request.id] = (answer, task, len(answer.tokens))

    async def _follow(self, request: GenerateRequest) -> None:
        """Puts what SGLang says about a request into the queue."""
        stream = await self._engine.async_generate(
            input_ids=request.prompt.tolist(),
            sampling_params=sampling_params(request, self.max_context),
            rid=request.id,
            return_logprob=True,
            stream=True,
        )
        async for chunk in stream:
            self._chunks.put_nowait((request.id, chunk))

    def _report(self, name: str, task: asyncio.Task[None]) -> None:
        """Puts into the queue why a request failed: nothing else of it will come, and `step` would wait for ever."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            finish = {"type": "abort", "message": f"SGLang: {error}"}
            self._chunks.put_nowait((name, {"meta_info": {"output_token_logprobs": [], "finish_reason": finish}}))

    def _take(self, name: str, chunk: Mapping[str, Any]) -> None:
        """Takes a chunk's new tokens, one by one: a stop text may end before the last of them."""
        if name not in self._running:
            return  # ended by a stop text while SGLang went on
        answer, _, before = self._running[name]
        tokens, logprobs, reason = new_tokens(chunk, len(answer.tokens) - before)
        if not answer.tokens and tokens:
            self._stats["prefill_tokens"] += len(answer.request.prompt)
        for token, logprob in zip(tokens, logprobs, strict=True):
            answer.append([token], [logprob], self.version)
            self._stats["sampled_tokens"] += 1
            if answer.request.sampling.stop and stop_text_ends(answer.request, answer.tokens, self._decode):
                if reason is None:
                    self._stop(name)
                return self._end(answer, "stop")
        if reason is not None:
            self._end(answer, reason, chunk["meta_info"]["finish_reason"].get("message") if reason == "error" else None)
        elif answer.request.stream and tokens:
            self._done.append(answer.completion(None))
        return None

    def _requeue(self) -> None:
        """Ends what is under way, takes the tokens that came, and puts the rest before all that wait."""
        while not self._chunks.empty():
            self._take(*self._chunks.get_nowait())
        answers = [answer for answer, _, _ in self._running.values()]
        for answer in answers:
            self._stop(answer.request.id)
            del self._running[answer.request.id]
        self._waiting.extendleft(reversed(answers))

    def _stop(self, name: str) -> None:
        """Makes SGLang end a request, and drops what it still says about it."""
        if name not in self._running:
            return
        _, task, _ = self._running[name]
        self._engine.tokenizer_manager.abort_request(rid=name)
        task.cancel()
        self._loop.run_until_complete(asyncio.wait([task]))
        kept = [entry for entry in (self._chunks.get_nowait() for _ in range(self._chunks.qsize())) if entry[0] != name]
        for entry in kept:
            self._chunks.put_nowait(entry)

    def _end(self, answer: Answer, stop_reason: str, error: str | None = None) -> None:
        self._ids.remove(answer.request.id)
        self._running.pop(answer.request.id, None)
        self._done.append(answer.completion(stop_reason, error))


def sampling_params(request: GenerateRequest, max_context: int) -> dict[str, Any]:
    """Returns SGLang's parameters of a request; stop texts are looked for by this engine."""
    sampling = request.sampling
    return {
        "max_new_tokens": min(sampling.max_tokens, max_context - len(request.prompt)),
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        # SGLang draws by a hash of this and the token's place in the whole sequence, so a continued answer goes on
        # with draws of its own; it takes 31 bits.
        "sampling_seed": request.seed % (2**31 - 1),
    }


def new_tokens(chunk: Mapping[str, Any], known: int) -> tuple[list[int], list[float], str | None]:
    """Returns a chunk's tokens beyond the first `known`, their log-probabilities, and why the answer ended, if it did.

    Chunks hold all that was sampled so far. SGLang's words for an end are `stop`, `length` and `abort`; an abort that
    this engine did not ask for is an error.
    """
    facts = chunk["meta_info"]
    triples = facts["output_token_logprobs"][known:]
    finish = facts.get("finish_reason")
    reason = None if finish is None else finish["type"]
    return (
        [int(token) for _, token, *_ in triples],
        [float(each[0]) for each in triples],
        {"abort": "error"}.get(reason, reason),
    )
