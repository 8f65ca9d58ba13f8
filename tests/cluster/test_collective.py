"""A broadcast among threads that each hold a member: what is sent is what all receive."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from rollcli.cluster.collective import Collective
from rollcli.cluster.payload import packed, unpacked

VALUES = [
    None,
    {"x": packed(torch.arange(12.0).reshape(3, 4)), "y": packed(torch.tensor(2.5, dtype=torch.bfloat16))},
    ({}, "words"),
    {"empty": packed(torch.zeros(0)), "large": packed(torch.randn(300_000))},
]


def members(count: int) -> list[Collective]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(count) as pool:
        made = [pool.submit(Collective, "127.0.0.1", port, count, rank, torch.device("cpu")) for rank in range(count)]
        return [each.result(60) for each in made]


def same(first: Any, second: Any) -> bool:
    if not isinstance(first, dict):
        return first == second
    return first.keys() == second.keys() and all(
        torch.equal(unpacked(first[name]), unpacked(second[name])) for name in first
    )


@pytest.mark.parametrize("count", [2, 3])
def test_all_receive_what_is_sent_in_order(count):
    first, *others = members(count)
    with ThreadPoolExecutor(count) as pool:
        received = [pool.submit(lambda member=member: [member.receive() for _ in VALUES]) for member in others]
        for value in VALUES:
            first.send(value)
        for each in received:
            assert all(map(same, each.result(60), VALUES))


def test_large_arrays_do_not_pass_through_the_description():
    first, other = members(2)
    sent: list[int] = []
    real = first._broadcast
    first._broadcast = lambda content: sent.append(content.size) or real(content)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(other.receive)
        first.send({"large": np.zeros(100_000, np.float32)})
        assert received.result(60)["large"].nbytes == 400_000
    assert sent[3] == 400_000 and sent[2] < 1000
