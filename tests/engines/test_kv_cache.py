"""The row cache and its attention against attention written out in float64."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from rollcli.engines.kv_cache import BLOCK, RowCache, attend, round_up
from rollcli.errors import EngineError

WIDTH, HEADS = 4, 2
CPU = torch.device("cpu")


def filled(rows: int, length: int) -> DynamicCache:
    """One layer whose key at (row, position) is `100 * row + position`, and whose value is the negative."""
    keys = (100.0 * torch.arange(rows)[:, None] + torch.arange(length))[:, None, :, None].expand(-1, HEADS, -1, WIDTH)
    cache = DynamicCache()
    cache.update(keys.clone(), -keys, 0)
    return cache


def written(rows: int, length: int) -> RowCache:
    cache = RowCache(1, CPU)
    cache.reserve(rows, length)
    cache.write(filled(rows, length), range(rows), range(rows))
    return cache


def test_round_up() -> None:
    assert [round_up(count, 16) for count in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_write_copies_one_prompt_to_many_rows() -> None:
    cache = RowCache(1, CPU)
    cache.reserve(4, 10)
    cache.write(filled(2, 10), [1, 1, 0], [0, 3, 2])
    assert cache.layers[0].keys[:, 0, 5, 0].tolist() == [105, 0, 5, 105]
    assert cache.layers[0].values[3, 1, 9, 2] == -109


def test_update_writes_each_row_at_its_own_position() -> None:
    cache = written(3, 10)
    cache.begin(torch.tensor([2, 7]))
    keys, values = cache.update(torch.full((2, HEADS, 1, WIDTH), 7.5), torch.full((2, HEADS, 1, WIDTH), 8.5), 0)
    assert keys.shape == (2, HEADS, BLOCK, WIDTH)
    assert (keys[0, 0, 2, 0], keys[1, 1, 7, 3], values[1, 0, 7, 0]) == (7.5, 7.5, 8.5)
    assert (keys[0, 0, 7, 0], keys[1, 0, 2, 0]) == (7, 102)


def test_mask_shows_a_row_its_own_past_only() -> None:
    cache = written(2, 10)
    mask = cache.begin(torch.tensor([0, 3]))
    assert mask.shape == (2, 1, 1, BLOCK)
    assert (mask == 0).sum(-1).flatten().tolist() == [1, 4]


def test_growing_keeps_what_is_there_and_zeroes_the_rest() -> None:
    cache = written(2, BLOCK)
    cache.reserve(3, BLOCK + 1)
    keys = cache.layers[0].keys
    assert keys.shape == (4, HEADS, 2 * BLOCK, WIDTH)
    assert keys[1, 0, BLOCK - 1, 0] == 100 + BLOCK - 1
    assert keys[2:].abs().sum() == 0 and keys[:, :, BLOCK:].abs().sum() == 0


def test_room_is_given_back_once_rows_are_half_as_long() -> None:
    cache = written(1, 4 * BLOCK)
    cache.reserve(1, 3 * BLOCK)
    assert cache.length == 4 * BLOCK
    cache.reserve(1, 2 * BLOCK)
    assert cache.length == 2 * BLOCK == cache.layers[0].keys.shape[2]


def test_move_and_clear() -> None:
    cache = written(4, 10)
    cache.move(np.array([3]), np.array([1]))
    cache.clear(np.array([0]))
    assert cache.layers[0].keys[:, 0, 5, 0].tolist() == [0, 305, 205, 305]


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (8, 1)])
def test_attention_of_one_token_equals_softmax_written_out(heads: int, key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    length, seen = 4 * BLOCK, 200
    query = torch.randn(1, heads, 1, 16, generator=generator)
    key, value = torch.randn(2, 1, key_heads, length, 16, generator=generator)
    mask = torch.zeros(1, 1, 1, length)
    mask[..., seen:] = -torch.inf
    output, _ = attend(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    for head in range(heads):
        shared = head // (heads // key_heads)
        scores = 0.3 * key[0, shared, :seen].double() @ query[0, head, 0].double()
        expected = torch.softmax(scores, 0) @ value[0, shared, :seen].double()
        assert torch.allclose(output[0, 0, head].double(), expected, atol=1e-6)


def test_attention_of_a_prompt_is_causal() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 8, 16, generator=generator)
    whole, _ = attend(torch.nn.Module(), query, key, value, None)
    part, _ = attend(torch.nn.Module(), query[:, :, :5], key[:, :, :5], value[:, :, :5], None)
    assert torch.allclose(whole[:, :5], part, atol=1e-6)


def test_attention_with_a_cap_or_sinks_is_refused() -> None:
    query = torch.zeros(1, 1, 1, 4)
    with pytest.raises(EngineError, match="softcap"):
        attend(torch.nn.Module(), query, query, query, torch.zeros(1, 1, 1, 1), softcap=50.0)
