"""Rollout engine for any causal language model of transformers, on a CPU or a GPU, by continuous batching.

    add ──▶ waiting ──admit──▶ prefill (once per distinct prompt) ──▶ rows ──one token per step──▶ completions

A step admits what waits while rows are free, runs the model once with one token per row, samples, and drops finished
rows at once. Prefill computes keys and values of a prompt without its last token; the last token is fed like a
sampled one, so every sampled token comes out of the same kind of forward pass.

**Batch invariance.** On a CPU in float32, tokens and log-probabilities of a request are the same bits whatever else
is in the batch: rows are padded to a multiple, prompts are prefilled with others of the same padded length only,
keys are padded to blocks (`kv_cache.py`), and draws are counters (`sampling.py`). Tested with one torch thread.

The library's own generation is not used because of speed: 128 tokens with a 0.26M-parameter model on one core, 64 and
512 rows, took `generate` 18k and 23k tokens/s (and it batches only what starts together), its continuous batching
(`generate_batch`, cache bounded) 2.1k and 0.4k, and this engine 24k and 36k: 1.3 and 1.5 times `generate`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import DynamicCache

from rollcli.data.images import digest
from rollcli.engines import naming, vision
from rollcli.engines.base import Completion, GenerateRequest
from rollcli.engines.kv_cache import ATTENTION, BLOCK, RowCache, round_up
from rollcli.engines.models import load_policy
from rollcli.engines.requests import Decode, decoder, refusal, stop_text_ends, without_tokens
from rollcli.engines.sampling import Draws, sample, uniforms
from rollcli.engines.storage import checksum
from rollcli.errors import EngineError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from rollcli.config.schema import ModelConfig, ParallelConfig

ROW_MULTIPLE = 32  # elements a vectorized loop takes at a time: the last row must not fall to the scalar rest
PREFILL_TOKENS = 8192  # most padded tokens of one prefill pass; bounds its memory


class TransformersEngine:
    """Generates with a model it owns (it replaces the model's attention), one token per running request and step.

    Requests in flight while `load_weights` is called go on: what they have in the KV cache was computed by the old
    weights, each further token is sampled by the new ones, and `Completion.versions` tells which sampled which. The
    parts of a streamed request, the last included, carry only tokens that no earlier part carried.

    Args:
        model: a causal language model with plain attention in every layer.
        max_rows: most requests that run at once; others wait in order of arrival.
        max_context: most tokens of prompt and answer together; what the model was made for when None.
        version: policy version of the weights.
        decode: returns the text of tokens; without it, requests with stop texts are refused.

    Raises:
        EngineError: the model keeps something else than keys and values of every token.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_rows: int = 256, max_context: int | None = None, version: int = 0,
        decode: Decode | None = None,
    ) -> None:  # fmt: skip
        config = model.config.get_text_config()
        self.max_context = _context(config, max_context)
        _check_supported(model, config, self.max_context)
        self._vision = vision.of(model)
        # The vision part's attention is not causal; it keeps its own.
        model.set_attn_implementation(ATTENTION if self._vision is None else {"text_config": ATTENTION})
        self.model = model.eval()
        self.max_rows = max_rows
        self.version = version
        self._decode_text = decode
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._waiting: deque[GenerateRequest] = deque()
        self._done: list[Completion] = []
        self._ids: set[str] = set()
        even = all(parameter.shape[0] % 2 == 0 for parameter in model.parameters())
        self._row_multiple = ROW_MULTIPLE // 2 if even else ROW_MULTIPLE
        self._rows = _Rows(round_up(max_rows, ROW_MULTIPLE))
        self._cache = RowCache(config.num_hidden_layers, model.device)
        self._prefilled = 0  # rows, from the first on, whose tokens before the last are in the cache
        self._stats = {"prefill_tokens": 0, "sampled_tokens": 0, "steps": 0, "model_s": 0.0, "busy_s": 0.0}

    @classmethod
    def load(
        cls, config: ModelConfig, *, device: torch.device, seed: int, max_rows: int, parallel: ParallelConfig,
        max_context: int | None = None,
    ) -> TransformersEngine:  # fmt: skip
        """Returns an engine for the recipe's model; see `InferEngine.load`."""
        if parallel.processes > 1:
            raise EngineError(
                f"the rollout engine `transformers` runs in one process, `rollout.parallel` says {parallel.processes}",
                hint="use more `rollout.replicas`, or another engine",
            )
        model = load_policy(config, device, seed)
        return cls(model, max_rows=max_rows, max_context=max_context, decode=decoder(config))

    @property
    def pending(self) -> int:
        """Requests queued or running, and completions that the next `step` will return."""
        return len(self._waiting) + self._rows.count + len(self._done)

    def stats(self) -> dict[str, float]:
        """Counters since the start.

        `prefill_tokens` counts prompt tokens computed by prefill, all but the last of each distinct prompt; `model_s`
        is time in forward passes (on a GPU, time to launch them) and `busy_s` all time in `step`.
        """
        return dict(self._stats)

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        """Queues requests; one that cannot be served comes back from `step` with `stop_reason="error"`.

        Raises:
            EngineError: a request with the same id is in flight.
        """
        for request in requests:
            if request.id in self._ids:
                raise EngineError(f"request `{request.id}` is already in flight")
            error = refusal(request, self.max_context, self._vocabulary, self._decode_text is not None, self._vision)
            if error:
                self._done.append(without_tokens(request, "error", error))
            else:
                self._ids.add(request.id)
                self._waiting.append(request)

    @torch.inference_mode()
    def abort(self, ids: Iterable[str]) -> None:
        """Ends requests; their tokens so far come back from the next `step`. Ids not in flight are ignored."""
        ids = self._ids.intersection(ids)
        if not ids:
            return
        for request in self._waiting:
            if request.id in ids:
                self._end(without_tokens(request, "abort"))
        self._waiting = deque(request for request in self._waiting if request.id not in ids)
        rows = np.array([row for row, request in enumerate(self._rows.requests) if request.id in ids], dtype=np.int64)
        for row in rows:
            self._end(self._rows.completion(row, "abort"))
        self._drop(rows)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Samples one token for every running request; returns what finished, and parts of streamed requests."""
        began = time.perf_counter()
        self._admit()
        if self._rows.count:
            self._record(*self._decode())
            self._stats["steps"] += 1
        completions, self._done = self._done, []
        self._stats["busy_s"] += time.perf_counter() - began
        return completions

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every weight by its hub name; of tied ones only the first."""
        return naming.hub_shapes(self.model)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replaces every weight in place; requests in flight go on (see the class).

        Names are the hub's. Of tied weights one is enough; if several come, they must be equal.

        Raises:
            WeightSyncError: a name is unknown or missing, or a shape differs; the old weights stay.
        """
        names, targets = naming.of(self.model), self.model.state_dict(keep_vars=True)
        names.check(weights)
        for group in (*names.groups, *names.tied):
            if set(group.hub) <= set(weights):  # of tied weights one, or a buffer, may be missing
                for name, tensor in names.from_hub({name: weights[name] for name in group.hub}).items():
                    targets[name].data.copy_(tensor)
        self.version = version

    def checksums(self) -> dict[str, int]:
        """Returns `storage.checksum` of every weight in the engine's precision, by hub name, tied ones once."""
        weights = naming.to_hub(self.model, naming.tensors_of(self.model))
        return {name: checksum(weight) for name, weight in weights.items()}

    def offload(self) -> None:
        """Moves the weights from a GPU to main memory and drops the KV cache; on a CPU, nothing.

        Requests in flight are prefilled anew afterwards, before all that wait.
        """
        if self.model.device.type != "cpu":
            self._drop_cache()
            self.model.to("cpu")
            # The allocator keeps what it once had; who shares the device could not take it.
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Moves the weights back."""
        self.model.to(self._cache.device)

    def _drop_cache(self) -> None:
        """Frees keys and values of all rows; the next step computes them anew."""
        self._cache = RowCache(len(self._cache.layers), self._cache.device)
        self._prefilled = 0

    def _admit(self) -> None:
        """Moves requests from the queue to free rows and prefills them."""
        while self._waiting and self._rows.count < self.max_rows:
            request = self._waiting.popleft()
            shift = 0
            if request.images is not None:
                shift = int(self._vision.positions(request.prompt, request.images)[0, -1]) + 1 - len(request.prompt)
            self._rows.add(request, self.max_context, shift)
        if self._rows.count:
            longest = int(self._rows.position[: self._rows.count].max()) + 1
            self._cache.reserve(round_up(self._rows.count, self._row_multiple), longest)
        prefixes: dict[bytes, list[int]] = {}
        for row in range(self._prefilled, self._rows.count):
            key = self._rows.prefix(row).tobytes() + digest(self._rows.requests[row].images)
            prefixes.setdefault(key, []).append(row)
        self._prefilled = self._rows.count
        by_length: dict[int, list[list[int]]] = {}
        for rows in prefixes.values():
            if self._rows.requests[rows[0]].images is not None:
                self._prefill_images(rows)
                continue
            by_length.setdefault(round_up(int(self._rows.position[rows[0]]), BLOCK), []).append(rows)
        for length, groups in by_length.items():
            size = max(1, PREFILL_TOKENS // max(length, 1))
            for start in range(0, len(groups) if length else 0, size):
                self._prefill(groups[start : start + size], length)

    def _prefill(self, groups: list[list[int]], length: int) -> None:
        """Computes keys and values of one prompt per group of rows, and copies them to the rows."""
        prompts = [self._rows.prefix(rows[0]) for rows in groups]
        # Padded by the last token, not by a fixed one: a NaN in the embedding of that one would reach every prompt.
        padded = np.stack([np.pad(prompt, (0, length - len(prompt)), mode="edge") for prompt in prompts])
        began = time.perf_counter()
        prefix = DynamicCache()
        self.model.base_model(
            input_ids=torch.from_numpy(padded.astype(np.int64)).to(self.model.device),
            position_ids=torch.arange(length, device=self.model.device).expand(len(prompts), -1),
            past_key_values=prefix,
            use_cache=True,
        )
        self._stats["model_s"] += time.perf_counter() - began
        self._stats["prefill_tokens"] += sum(len(prompt) for prompt in prompts)
        source = [index for index, rows in enumerate(groups) for _ in rows]
        self._cache.write(prefix, source, [row for rows in groups for row in rows])

    def _prefill_images(self, rows: list[int]) -> None:
        """As `_prefill`, of one prompt with images: alone, for the vision part takes the patches of all in one."""
        request, prompt = self._rows.requests[rows[0]], self._rows.prefix(rows[0])
        # The prompt's last token is no placeholder, as `refusal` sees to.
        padding = np.full(round_up(len(prompt), BLOCK) - len(prompt), request.prompt[-1])
        padded = np.concatenate([prompt, padding]).astype(np.int64)
        positions = self._vision.positions(padded, request.images)
        device = self.model.device
        began = time.perf_counter()
        prefix = DynamicCache()
        self.model.base_model(
            input_ids=torch.from_numpy(padded[None]).to(device),
            position_ids=torch.from_numpy(positions[:, None]).to(device),
            past_key_values=prefix,
            use_cache=True,
            **vision.tensors(request.images, device),
        )
        self._stats["model_s"] += time.perf_counter() - began
        self._stats["prefill_tokens"] += len(prompt)
        self._cache.write(prefix, [0] * len(rows), rows)

    def _decode(self) -> tuple[np.ndarray, np.ndarray]:
        """Runs the model on the last token of every row; returns a token and its log-probability for each."""
        rows, device = self._rows, self.model.device
        padded = round_up(rows.count, self._row_multiple)
        rows.position[rows.count : padded] = 0
        positions = places = torch.from_numpy(rows.position[:padded]).to(device)
        if self._vision is not None:
            positions = torch.from_numpy(rows.position[:padded] + rows.shift[:padded]).to(device)
        began = time.perf_counter()
        logits = self.model(
            input_ids=torch.from_numpy(rows.last_token[:padded, None]).to(device),
            attention_mask=self._cache.begin(places),
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        self._stats["model_s"] += time.perf_counter() - began
        tokens, logprobs = sample(logits, rows.draws(padded))
        return tokens[: rows.count], logprobs[: rows.count]

    def _record(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Appends a token to every row, hands out parts and completions, and drops the rows that ended."""
        rows = self._rows
        failed = ~np.isfinite(logprobs)
        rows.append(tokens, logprobs, self.version, ~failed)
        self._stats["sampled_tokens"] += len(tokens) - int(failed.sum())
        stopped = (rows.stop_tokens[: rows.count] == tokens[:, None]).any(axis=1)
        for row in np.flatnonzero(rows.has_stop[: rows.count] & ~failed):
            sampled = rows.tokens[row, : rows.sampled[row]]
            stopped[row] |= stop_text_ends(rows.requests[row], sampled, self._decode_text)
        ended = failed | stopped | (rows.sampled[: rows.count] >= rows.budget[: rows.count])
        for row in np.flatnonzero(ended):
            if failed[row]:
                error = f"the logits of answer token {rows.sampled[row]} are NaN or infinite"
                self._end(rows.completion(row, "error", error))
            else:
                self._end(rows.completion(row, "stop" if stopped[row] else "length"))
        for row in np.flatnonzero(rows.stream[: rows.count] & ~ended):
            self._done.append(rows.completion(row, None))
        if failed.any():
            self._cache.clear(np.flatnonzero(failed))
        self._drop(np.flatnonzero(ended))

    def _end(self, completion: Completion) -> None:
        self._ids.remove(completion.id)
        self._done.append(completion)

    def _drop(self, ended: np.ndarray) -> None:
        """Fills the places of ended rows with the last running ones."""
        self._prefilled -= int((ended < self._prefilled).sum())
        source, holes = self._rows.drop(ended)
        if len(holes) and self._prefilled:
            self._cache.move(source, holes)


class _Rows:
    """What the host knows about the running rows, as columns; row `i` owns row `i` of the KV cache.

    `position` is where the next token goes: all before it are in the cache, and `last_token` is that token. Where there
    are images, its position in the text is `shift` more (less, since an image is longer than it is wide).
    """

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self.requests: list[GenerateRequest] = []
        self.last_token = np.zeros(capacity, dtype=np.int64)
        self.position = np.zeros(capacity, dtype=np.int64)
        self.shift = np.zeros(capacity, dtype=np.int64)
        self.sampled = np.zeros(capacity, dtype=np.int64)
        self.drawn = np.zeros(capacity, dtype=np.int64)
        self.delivered = np.zeros(capacity, dtype=np.int64)
        self.budget = np.zeros(capacity, dtype=np.int64)
        self.seed = np.zeros(capacity, dtype=np.uint64)
        self.temperature = np.ones(capacity, dtype=np.float32)
        self.top_p = np.ones(capacity, dtype=np.float32)
        self.top_k = np.zeros(capacity, dtype=np.int64)
        self.min_tokens = np.zeros(capacity, dtype=np.int64)
        self.stream = np.zeros(capacity, dtype=bool)
        self.has_stop = np.zeros(capacity, dtype=bool)
        self.stop_tokens = np.full((capacity, 1), -1, dtype=np.int64)
        self.tokens = np.zeros((capacity, 64), dtype=np.int32)
        self.logprobs = np.zeros((capacity, 64), dtype=np.float32)
        self.versions = np.zeros((capacity, 64), dtype=np.int32)

    def add(self, request: GenerateRequest, max_context: int, shift: int) -> None:
        row, sampling = self.count, request.sampling
        self.count += 1
        self.requests.append(request)
        self.last_token[row] = request.prompt[-1]
        self.position[row] = len(request.prompt) - 1
        self.shift[row] = shift
        self.sampled[row] = self.delivered[row] = 0
        self.drawn[row] = request.drawn
        self.budget[row] = min(sampling.max_tokens, max_context - len(request.prompt))
        self.seed[row] = request.seed % 2**64
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_tokens[row] = sampling.min_tokens
        self.stream[row] = request.stream
        self.has_stop[row] = bool(sampling.stop)
        stops = np.array(sampling.stop_token_ids, dtype=np.int64)
        self.stop_tokens = _widened(self.stop_tokens, len(stops), fill=-1)
        self.stop_tokens[row] = -1
        self.stop_tokens[row, : len(stops)] = stops

    def prefix(self, row: int) -> np.ndarray:
        """Returns all tokens of a row before its last one."""
        return np.concatenate([self.requests[row].prompt, self.tokens[row, : self.sampled[row]]])[:-1]

    def draws(self, rows: int) -> Draws:
        random = uniforms(self.seed[:rows], self.drawn[:rows] + self.sampled[:rows])
        barred = (self.sampled[: self.count] < self.min_tokens[: self.count])[:, None] & (
            self.stop_tokens[: self.count] >= 0
        )
        places = np.nonzero(barred) if barred.any() else None
        pairs = None if places is None else (places[0], self.stop_tokens[places])
        return Draws(random, self.temperature[:rows], self.top_p[:rows], self.top_k[:rows], pairs)

    def append(self, tokens: np.ndarray, logprobs: np.ndarray, version: int, valid: np.ndarray) -> None:
        """Adds one token to every row; where it is not `valid` the place is filled but not counted."""
        width = int(self.sampled[: self.count].max()) + 1
        if width > self.tokens.shape[1]:
            self.tokens = _widened(self.tokens, 2 * width)
            self.logprobs = _widened(self.logprobs, 2 * width)
            self.versions = _widened(self.versions, 2 * width)
        place = np.arange(self.count), self.sampled[: self.count]
        self.tokens[place] = tokens
        self.logprobs[place] = logprobs
        self.versions[place] = version
        self.last_token[: self.count] = tokens
        self.position[: self.count] += 1
        self.sampled[: self.count] += valid

    def completion(self, row: int, stop_reason: str | None, error: str | None = None) -> Completion:
        """Returns the tokens of a row; of a streamed row, those that no earlier part carried."""
        part = slice(self.delivered[row], self.sampled[row])
        if self.stream[row]:
            self.delivered[row] = self.sampled[row]
        columns = (self.tokens[row, part].copy(), self.logprobs[row, part].copy(), self.versions[row, part].copy())
        return Completion(self.requests[row].id, *columns, stop_reason, error)

    def drop(self, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moves the last running rows into the places of `ended`; returns which row moved where."""
        left = self.count - len(ended)
        holes = ended[ended < left]
        source = np.setdiff1d(np.arange(left, self.count), ended)
        for column in vars(self).values():
            if isinstance(column, np.ndarray):
                column[holes] = column[source]
        for hole, row in zip(holes, source):
            self.requests[hole] = self.requests[row]
        del self.requests[left:]
        self.count = left
        return source, holes


def _widened(column: np.ndarray, width: int, fill: int = 0) -> np.ndarray:
    extra = max(0, width - column.shape[1])
    return np.pad(column, ((0, 0), (0, extra)), constant_values=fill) if extra else column


def _context(config: PretrainedConfig, asked: int | None) -> int:
    """Returns the context to serve: what was asked, within what the model was made for."""
    made_for = getattr(config, "max_position_embeddings", None)
    if asked is None and made_for is None:
        raise EngineError(
            f"a `{config.model_type}` model does not say its context", hint="set `rollout.engine_args.max_context`"
        )
    if asked is not None and asked < 2:
        raise EngineError(f"max_context {asked} leaves no room for a prompt and an answer", hint="set 2 or more")
    if asked is not None and made_for is not None and asked > made_for:
        raise EngineError(
            f"max_context {asked} is more than the {made_for} tokens the model was made for",
            hint=f"set at most {made_for}, or leave it out",
        )
    return made_for if asked is None else asked


def _check_supported(model: PreTrainedModel, config: PretrainedConfig, max_context: int) -> None:
    """Refuses models whose state is more, or less, than keys and values of every token."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if model.config.is_encoder_decoder or not model._supports_attention_backend:
        why = "its attention cannot be replaced"
    elif kinds - {"full_attention", "sliding_attention"}:
        why = f"it has layers of the kind {', '.join(sorted(kinds - {'full_attention'}))}"
    elif window is not None and window < max_context and getattr(config, "use_sliding_window", True):
        why = f"its attention window of {window} is shorter than the context of {max_context}"
    elif rope.get("rope_type") in ("dynamic", "longrope"):
        why = "its positions depend on the longest row of the batch"
    else:
        return
    raise EngineError(
        f"the rollout engine `transformers` does not support this `{config.model_type}` model: {why}",
        hint="use another engine, or a max_context within the window where that is the reason",
    )
