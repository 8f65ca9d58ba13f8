"""Weights as they travel: every bit arrives, whole or as what changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollcli.cluster.payload import Adapter, Changed, Packed, applied, difference, merged, packed, size, unpacked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (0, 2)])
def test_a_tensor_comes_out_as_it_went_in(dtype, shape):
    tensor = (torch.randn(shape) * 100).to(dtype)
    back = unpacked(packed(tensor))
    assert back.dtype is dtype and back.shape == tensor.shape and torch.equal(back, tensor)


def test_infinities_and_the_sign_of_zero_survive():
    tensor = torch.tensor([float("inf"), -0.0, 1e-40], dtype=torch.bfloat16)
    assert torch.equal(unpacked(packed(tensor)).view(torch.int16), tensor.view(torch.int16))


def test_every_bfloat16_pattern_survives():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    sent = packed(every)
    assert (sent.bits.dtype, sent.dtype) == (np.uint16, "bfloat16") and sent.bits.tolist() == list(range(2**16))
    assert torch.equal(unpacked(sent).view(torch.uint16), every.view(torch.uint16))


def test_memory_is_shared_and_may_be_read_only(recwarn):
    array = np.zeros(3, np.float32)
    assert unpacked(Packed(array, "float32")).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    assert unpacked(Packed(array, "float32")).tolist() == [0, 0, 0]
    assert not recwarn.list


def test_a_view_is_packed_as_what_it_shows():
    tensor = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(unpacked(packed(tensor)), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [0, 1, 7, 1000])
def test_what_changed_leads_from_the_old_to_the_new(dtype, changed):
    generator = torch.Generator().manual_seed(changed)
    old = torch.randn(40, 50, generator=generator).to(dtype)
    new = old.clone()
    new.view(-1)[torch.randperm(2000, generator=generator)[:changed]] += 1
    sent = difference(packed(old), packed(new))
    # An index of 4 bytes beside each value: two thirds of 2000 bfloat16 values are past what is worth it.
    few = changed * (4 + old.itemsize) <= 0.5 * 2000 * old.itemsize
    assert isinstance(sent, Changed if few else Packed)
    if few:
        assert len(sent.indices) == changed
    back = applied(packed(old), sent) if few else sent
    assert torch.equal(unpacked(back), new)


def test_minus_zero_counts_as_a_change():
    old, new = packed(torch.zeros(100)), packed(-torch.zeros(100))
    new.bits[1:] = 0
    sent = difference(old, new)
    assert isinstance(sent, Changed) and sent.indices.tolist() == [0]
    assert np.signbit(applied(old, sent).bits[0]) and not np.signbit(old.bits[0])


def test_without_a_predecessor_of_the_same_kind_all_is_sent():
    now = packed(torch.ones(3))
    for before in (None, packed(torch.ones(3, dtype=torch.bfloat16)), packed(torch.ones(4))):
        assert difference(before, now) is now


def test_an_adapter_is_added_in_float32():
    base, a, b = torch.randn(6, 5), torch.randn(2, 5), torch.randn(6, 2)
    for dtype in (torch.float32, torch.bfloat16):
        held = base.to(dtype)
        found = merged(packed(held), Adapter(packed(a), packed(b), 1.5))
        assert found.dtype is dtype
        torch.testing.assert_close(found, (held.float() + 1.5 * (b @ a)).to(dtype), rtol=0, atol=0)


def test_the_size_is_what_travels():
    entries = {
        "whole": packed(torch.zeros(4, dtype=torch.bfloat16)),
        "few": Changed(np.zeros(3, np.uint32), np.zeros(3, np.float32)),
        "adapter": Adapter(packed(torch.zeros(2, 5)), packed(torch.zeros(6, 2)), 1.0),
    }
    assert size(entries) == 8 + 24 + 4 * (10 + 12)
