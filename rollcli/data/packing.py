"""Puts sequences into rows and rows into micro-batches, at the training engine's edge.

A row is a sequence, or several packed ones whose positions start at 0 each and which attend only to themselves; what is
left of a row is filled by a pseudo-sequence that no loss looks at. A micro-batch is as many rows of one width as fit
the token budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollcli.data.batch import Batch


@dataclass
class MicroBatch:
    """Rows of equal width R × W, and where the batch's tokens stand in them.

    Attributes:
        ids: int64 `[R, W]`.
        positions: int64 `[R, W]`; each sequence counts from 0.
        source: int64 `[M]`, index into the batch's token columns of every token in this micro-batch.
        place: int64 `[M]`, flat index into `[R * W]` of the same tokens.
        packed: True when a row holds more than one sequence.
    """

    ids: np.ndarray
    positions: np.ndarray
    source: np.ndarray
    place: np.ndarray
    packed: bool


def micro_batches(batch: Batch, token_budget: int, packing: bool) -> list[MicroBatch]:
    """Returns micro-batches that hold every trajectory once.

    Sequences are taken longest first, so rows of one micro-batch are of similar length and little is padded. A sequence
    longer than the budget gets a micro-batch of its own: it is never cut.
    """
    order = [int(index) for index in np.argsort(-batch.lengths, kind="stable") if batch.lengths[index] > 0]
    made: list[MicroBatch] = []
    start = 0
    while start < len(order):
        width = int(batch.lengths[order[start]])
        capacity = max(token_budget // width, 1)
        rows, start = _fill(order, start, batch.lengths, width, capacity, packing)
        made.append(_layout(batch, rows, width))
    return made


def _fill(
    order: list[int], start: int, lengths: np.ndarray, width: int, capacity: int, packing: bool
) -> tuple[list[list[int]], int]:
    """Fills at most `capacity` rows of `width` by first fit; returns them and the first sequence left over."""
    rows: list[list[int]] = []
    room: list[int] = []
    while start < len(order):
        length = int(lengths[order[start]])
        row = next((r for r, left in enumerate(room) if left >= length), None) if packing else None
        if row is None:
            if len(rows) == capacity:
                break
            rows.append([])
            room.append(width)
            row = len(rows) - 1
        rows[row].append(order[start])
        room[row] -= length
        start += 1
    return rows, start


def _layout(batch: Batch, rows: list[list[int]], width: int) -> MicroBatch:
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros((len(rows), width), dtype=np.int64)
    sources: list[np.ndarray] = []
    places: list[np.ndarray] = []
    packed = any(len(row) > 1 for row in rows)
    for number, row in enumerate(rows):
        column = 0
        for index in row:
            first, last = int(batch.offsets[index]), int(batch.offsets[index + 1])
            length = last - first
            ids[number, column : column + length] = batch.tokens["ids"][first:last]
            positions[number, column : column + length] = np.arange(length)
            sources.append(np.arange(first, last))
            places.append(number * width + np.arange(column, column + length))
            column += length
        # Without packing the rest of a row only follows the sequence, which causal attention ignores; with packing its
        # positions start at 0 again, which is how the model tells one sequence from the next.
        rest = np.arange(width - column)
        positions[number, column:] = rest if packed else column + rest
    return MicroBatch(ids, positions, np.concatenate(sources), np.concatenate(places), packed)
