"""How long each stage takes on given devices: the slower of computing and moving, for every pass.

Roofline (Williams, Waterman, Patterson, CACM 2009): F operations on B bytes take max(F / peak, B / bandwidth), each
peak taken at the share that `Constants` says is reached. Symbols: N parameters, L layers, h hidden width, q and v the
widths of all queries and of all keys, T tokens of a pass, s tokens of a sequence, and t, p, c, d the degrees of tensor,
pipeline, context and data parallelism.

    forward operations    2 N T + 2 L q Σ s²       "Scaling Laws for Neural Language Models", arXiv 2001.08361, §2.1;
                                                   attention causal, so half of its square is computed
    backward              twice the forward        arXiv 2104.04473, appendix; recomputation adds one forward
    decode step           bytes of all weights that the rows touch, and of all their keys and values
    experts touched       E (1 - (1 - k/E)^rows)   of E experts with k for each token, routed evenly
    all-reduce            2 (t-1)/t of its bytes   ring; arXiv 1909.08053: two in each layer's forward pass
    fully sharded         3 N values a pass        arXiv 1910.02054, §7.2.2: two gathers, one scatter
    pipeline bubble       (p - 1) / m of a pass    arXiv 2104.04473, §2.2.1, of m micro-batches
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollcli.devices.constants import Constants, Cost, slowest
from rollcli.devices.facts import ModelFacts

GIGA, TERA = 1e9, 1e12
WIDTH = 2
"""Bytes of a number in passes and in the cache: bfloat16."""
OPTIMIZER_BYTES = 30
"""Moved for each parameter by AdamW in float32: weight, gradient and two moments read, all but the gradient written
back, and the bfloat16 copy written."""
STORED_BYTES = 12
"""Written for each parameter by a checkpoint: float32 weights and moments."""


class Rates(Protocol):
    """What a device can do at best, as its data sheet says; any chip with these fields.

    Attributes:
        memory_gib: memory in GiB.
        bandwidth_gb_s: of its memory, in GB/s.
        bf16_tflops: dense matrix peak, in 10^12 operations a second.
        link_gb_s: between devices of one machine, both directions together, in GB/s.
        network_gb_s: between machines, for each device and direction, in GB/s.
    """

    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float
    link_gb_s: float
    network_gb_s: float


@dataclass(frozen=True)
class Degrees:
    """How one copy of a model is spread, and how many copies there are.

    Attributes:
        tensor, pipeline, context, expert: degrees of parallelism.
        data: copies.
        per_machine: devices of one machine, which its links connect.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    per_machine: int = 8

    @property
    def each(self) -> int:
        """Devices of one copy."""
        return self.tensor * self.pipeline * self.context

    @property
    def devices(self) -> int:
        """Devices of all copies."""
        return self.each * self.data


def matrix_parameters(facts: ModelFacts) -> int:
    """Returns the parameters that multiply every token: all active ones but the table of embeddings, with the head."""
    return facts.active - facts.parameters["embeddings"] * (not facts.tied)


def forward_operations(facts: ModelFacts, tokens: float, squares: float) -> float:
    """Returns the operations of one forward pass: 2 N T + 2 L q Σ s².

    Args:
        squares: sum of the sequences' squared lengths.
    """
    return 2 * matrix_parameters(facts) * tokens + 2 * facts.layers * facts.query_width * squares


def kv_bytes(facts: ModelFacts) -> float:
    """Returns the bytes that one token keeps in the cache of a whole model."""
    return 2 * facts.layers * facts.kv_width * WIDTH


def touched_parameters(facts: ModelFacts, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the parameters that a decode step reads: of the experts, those expected to have a token."""
    rows = np.asarray(rows, dtype=float)
    expert = _expert_parameters(facts)
    always = matrix_parameters(facts) - facts.active_experts * expert
    unused = (1 - facts.active_experts / max(facts.experts, 1)) ** rows
    return always + facts.experts * (1 - unused) * expert


def decode(
    facts: ModelFacts,
    chip: Rates,
    constants: Constants,
    degrees: Degrees,
    rows: NDArray[np.float64],
    context: float,
) -> dict[str, NDArray[np.float64]]:
    """Returns the seconds of one decode step of a replica by number of rows, by constant: [rows].

    Each step reads the weights its rows touch and all their keys and values, spread over t devices; heads of keys
    and values that are fewer than t are kept several times. Two all-reduces in each layer follow one another.

    Args:
        rows: numbers of rows.
        context: mean tokens in the cache of a row.
    """
    rows = np.asarray(rows, dtype=float)
    spread = degrees.tensor * degrees.pipeline
    cache = kv_bytes(facts) / (min(degrees.tensor, facts.kv_heads) * degrees.pipeline)
    moved = touched_parameters(facts, rows) * WIDTH / spread + rows * context * cache
    operations = rows * (2 * matrix_parameters(facts) + 4 * facts.layers * facts.query_width * context) / spread
    move_s = moved / (chip.bandwidth_gb_s * GIGA * constants.decode_bandwidth)
    compute_s = operations / (chip.bf16_tflops * TERA * constants.decode_compute)
    reduces = 2 * facts.layers * (degrees.tensor > 1)
    shared = 2 * (degrees.tensor - 1) / degrees.tensor * rows * facts.hidden * WIDTH
    wire, rate = _wire(degrees.tensor, degrees, chip, constants)
    # Pipeline stages follow one another for every token: each does its part of the layers, so times add up again.
    follow = degrees.pipeline
    return {
        "decode_bandwidth": np.where(move_s >= compute_s, move_s, 0.0) * follow,
        "decode_compute": np.where(move_s < compute_s, compute_s, 0.0) * follow,
        wire: reduces * shared / rate,
        "hop_s": np.full(rows.shape, (reduces + follow - 1) * constants.hop_s),
        "decode_call_s": np.full(rows.shape, constants.decode_call_s),
    }


def rows_that_fit(facts: ModelFacts, chip: Rates, degrees: Degrees, context: float, share: float = 0.9) -> int:
    """Returns how many rows of `context` tokens a replica's memory holds beside its weights; at least 1.

    Args:
        share: of the device's memory that the engine uses.
    """
    spread = degrees.tensor * degrees.pipeline
    room = chip.memory_gib * 2**30 * share - facts.total * WIDTH / spread
    row = context * kv_bytes(facts) / (min(degrees.tensor, facts.kv_heads) * degrees.pipeline)
    return max(int(room // row), 1) if row else 1


def prefill(
    facts: ModelFacts, chip: Rates, constants: Constants, degrees: Degrees, tokens: float, squares: float
) -> Cost:
    """Returns the time in which a replica computes keys and values of prompts."""
    return _pass(facts, chip, degrees, tokens, squares, 1, "prefill_compute", constants)


def forward(
    facts: ModelFacts,
    chip: Rates,
    constants: Constants,
    degrees: Degrees,
    tokens: float,
    squares: float,
    micro_tokens: float,
) -> Cost:
    """Returns the time of a forward pass over a batch, without gradients, spread over all copies.

    Args:
        tokens, squares: of the whole batch.
        micro_tokens: of one micro-batch of one copy.
    """
    mine, mine_squares, passes = tokens / degrees.data, squares / degrees.data, _passes(tokens, degrees, micro_tokens)
    compute = _pass(facts, chip, degrees, mine, mine_squares, 1, "prefill_compute", constants)
    gathers = _sharded(facts, chip, constants, degrees, values=1, passes=passes)
    return slowest(compute, gathers) * _bubble(degrees, passes) + Cost({"pass_s": passes * constants.pass_s})


def update(
    facts: ModelFacts,
    chip: Rates,
    constants: Constants,
    degrees: Degrees,
    tokens: float,
    squares: float,
    micro_tokens: float,
    steps: int = 1,
    recompute: bool = False,
) -> Cost:
    """Returns the time of forward and backward passes over a batch and of its optimizer steps.

    Gathers of sharded weights and scatters of gradients run beside the passes, so the slower counts; tensor-parallel
    all-reduces, context-parallel rings and experts' all-to-alls do not.

    Args:
        tokens, squares: of the whole batch.
        micro_tokens: of one micro-batch of one copy.
        steps: optimizer steps the batch is split into.
        recompute: activations are computed anew in the backward pass.
    """
    mine, mine_squares = tokens / degrees.data, squares / degrees.data
    passes = max(_passes(tokens, degrees, micro_tokens), steps)
    compute = _pass(facts, chip, degrees, mine, mine_squares, 4 if recompute else 3, "train_compute", constants)
    gathers = _sharded(facts, chip, constants, degrees, values=3, passes=passes)
    each = optimizer(facts, chip, constants, degrees)
    passing = slowest(compute, gathers) * _bubble(degrees, passes / steps)
    return passing + Cost({"pass_s": passes * constants.pass_s}) + each * steps


def optimizer(facts: ModelFacts, chip: Rates, constants: Constants, degrees: Degrees) -> Cost:
    """Returns the time of one optimizer step over the shards: `OPTIMIZER_BYTES` a parameter, at memory's speed."""
    moved = OPTIMIZER_BYTES * facts.total / degrees.devices
    return Cost({"optimizer_bandwidth": moved / (chip.bandwidth_gb_s * GIGA * constants.optimizer_bandwidth)})


def sync(
    facts: ModelFacts, chip: Rates, constants: Constants, trainers: Degrees, replicas: Degrees, transport: str
) -> Cost:
    """Returns the time to bring the weights from trainers to replicas.

    `cuda_ipc`: shards are gathered over the trainers' links and copied in device memory. `broadcast`: a pipelined
    broadcast moves every byte once over the slowest wire, into each device's own shard. `object_store`: through main
    memory, in and out.

    Args:
        transport: `cuda_ipc`, `broadcast` or `object_store`.
    """
    whole = facts.total * WIDTH
    shard = whole / (replicas.tensor * replicas.pipeline)
    gathered = _collective(whole / trainers.pipeline, trainers.data * trainers.tensor, trainers, chip, constants)
    if transport == "object_store":
        return gathered + Cost({"store_gb_s": whole / (constants.store_gb_s * GIGA)})
    if transport == "cuda_ipc":
        copy_s = 2 * shard / (chip.bandwidth_gb_s * GIGA * constants.decode_bandwidth)
        return gathered + Cost({"decode_bandwidth": copy_s})
    wire, rate = _wire(trainers.devices + replicas.devices, trainers, chip, constants)
    return gathered + Cost({wire: shard / rate})


def hand_over(
    facts: ModelFacts, constants: Constants, trainers: Degrees, replicas: Degrees, offload_optimizer: bool
) -> Cost:
    """Returns the time in which colocated roles leave and take a device: the replica's shard goes out and comes back,
    and the trainer's, with its optimizer's state when that is moved too."""
    replica = facts.total * WIDTH / (replicas.tensor * replicas.pipeline)
    trainer = facts.total * (4 + 8 * offload_optimizer) / trainers.devices
    return Cost({"host_gb_s": 2 * (replica + trainer) / (constants.host_gb_s * GIGA)})


def checkpoint(facts: ModelFacts, constants: Constants, degrees: Degrees) -> Cost:
    """Returns the time to write weights and optimizer, every machine its shards."""
    machines = max(degrees.devices // degrees.per_machine, 1)
    return Cost({"storage_gb_s": STORED_BYTES * facts.total / (machines * constants.storage_gb_s * GIGA)})


def _pass(
    facts: ModelFacts,
    chip: Rates,
    degrees: Degrees,
    tokens: float,
    squares: float,
    times: int,
    share: str,
    constants: Constants,
) -> Cost:
    """`times` forward passes' worth of work of one copy: its devices' part, and what they exchange meanwhile."""
    operations = times * forward_operations(facts, tokens, squares) / degrees.each
    reached = chip.bf16_tflops * TERA * getattr(constants, share)
    cost = Cost({share: operations / reached})
    layers, mine = facts.layers / degrees.pipeline, tokens / degrees.context
    if degrees.tensor > 1:
        wire, rate = _wire(degrees.tensor, degrees, chip, constants)
        each = 2 * (degrees.tensor - 1) / degrees.tensor * mine * facts.hidden * WIDTH
        cost += Cost({wire: times * 2 * layers * each / rate})
    if degrees.context > 1:
        wire, rate = _wire(degrees.tensor * degrees.context, degrees, chip, constants)
        ring = (degrees.context - 1) * mine * 2 * facts.kv_width / degrees.tensor * WIDTH
        # The ring's sends hide behind attention; what it takes longer counts.
        attention_s = times * 2 * facts.layers * facts.query_width * squares / degrees.each / reached
        cost += Cost({wire: max(times * layers * ring / rate - attention_s, 0.0)})
    if degrees.expert > 1 and facts.experts:
        wire, rate = _wire(degrees.expert, degrees, chip, constants)
        sent = mine * facts.active_experts * facts.hidden * WIDTH * (degrees.expert - 1) / degrees.expert
        sparse = facts.sparse_layers / degrees.pipeline
        cost += Cost({wire: times * 2 * sparse * sent / degrees.tensor / rate})
    return cost


def _expert_parameters(facts: ModelFacts) -> float:
    """Parameters of one expert, in all its layers."""
    return facts.sparse_layers * 3 * facts.hidden * facts.expert_intermediate


def _passes(tokens: float, degrees: Degrees, micro_tokens: float) -> float:
    return max(math.ceil(tokens / degrees.data / micro_tokens), 1)


def _bubble(degrees: Degrees, passes: float) -> float:
    return 1 + (degrees.pipeline - 1) / max(passes, 1.0)


def _sharded(
    facts: ModelFacts, chip: Rates, constants: Constants, degrees: Degrees, values: int, passes: float
) -> Cost:
    """Collectives of fully sharded copies: in every pass `values` times all parameters, which d devices share."""
    shard = facts.total * WIDTH / (degrees.tensor * degrees.pipeline)
    if facts.experts and degrees.expert > 1:
        # Experts stay where they are: only the rest is gathered.
        routed = facts.experts * _expert_parameters(facts) * WIDTH / (degrees.tensor * degrees.pipeline)
        shard -= (1 - 1 / degrees.expert) * routed
    return _collective(shard, degrees.data * degrees.context, degrees, chip, constants) * (values * passes)


def _collective(size: float, members: int, degrees: Degrees, chip: Rates, constants: Constants) -> Cost:
    """A gather or scatter of `size` bytes over a ring: (m - 1)/m of them pass every device."""
    if members <= 1:
        return Cost()
    wire, rate = _wire(members * degrees.tensor, degrees, chip, constants)
    return Cost({wire: (members - 1) / members * size / rate})


def _wire(span: int, degrees: Degrees, chip: Rates, constants: Constants) -> tuple[str, float]:
    """Returns the constant and the bytes a second of the slowest wire among `span` neighbouring devices.

    Data sheets add both directions of a link, of which a ring uses one.
    """
    if span <= degrees.per_machine and chip.link_gb_s:
        return "link", chip.link_gb_s / 2 * GIGA * constants.link
    return "network", chip.network_gb_s * GIGA * constants.network
