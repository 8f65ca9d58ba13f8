"""Sequences split over real processes, against the engine on one process; and what a peer gets of a row."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from rollcli.engines import context_parallel
from rollcli.errors import EngineError

pytestmark = pytest.mark.usefixtures("one_rank")
spec = importlib.util.spec_from_file_location("parallel_ranks", Path(__file__).with_name("parallel_ranks.py"))
ranks = importlib.util.module_from_spec(spec)
sys.modules["parallel_ranks"] = ranks
spec.loader.exec_module(ranks)

PAIR = {"parallel": {"context": 2}}
CASES = {
    "packed": {"kind": "tied", **PAIR},
    "padded": {"kind": "tied", **PAIR, "packing": False},
    "recomputed": {"kind": "tied", **PAIR, "recompute_activations": True, "micro_batch_tokens": 1000},
    "windows": {"kind": "window", **PAIR},
    "mixture": {"kind": "moe", **PAIR, "engine_args": {"shard_size": 1}},
    "experts": {"kind": "moe", "parallel": {"context": 2, "expert": 2}},
    "critic": {"kind": "tied", **PAIR, "critic": True},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    ranks.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def two(work: Path) -> list[dict]:
    return ranks.run_ranks(work / "two", CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(work, two, name: str) -> None:
    case = CASES[name]
    alone = ranks.run_case(ranks.make_engine(work / case["kind"], critic=case.get("critic", False)))
    ranks.check_equal([found[name] for found in two], alone)


def test_a_checkpoint_of_two_processes_loads_on_one(work, two) -> None:
    engine = ranks.make_engine(work / "moe")
    engine.load(work / "two" / "mixture.saved")
    assert ranks.shared.same(engine.named_weights(), two[0]["mixture"]["weights"])
    assert ranks.shared.same(engine.optimizer_state(), two[0]["mixture"]["state"])


def test_stretches_are_equal_and_cover_the_places(work) -> None:
    """Three peers of a row of 7, seen from each: 2 fill up, and every place is somebody's."""
    parallel = context_parallel.ContextParallel(model(work / "tied"), dist.group.WORLD)
    ids, positions = torch.arange(14).reshape(2, 7), torch.arange(7).repeat(2, 1)
    rows, columns = np.array([0, 1, 1, 0]), np.array([6, 0, 4, 1])
    parallel.size = 3
    found = {}
    for parallel.rank in range(3):
        part = parallel.split(ids, positions, rows, columns)
        assert part.ids.shape == (2, 3) and part.most == 2
        for row, column in zip(part.rows, part.columns):
            found[(row, 3 * parallel.rank + column)] = int(part.ids[row, column])
    assert found == {(row, column): 7 * row + column for row, column in zip(rows, columns)}
    # Peer 0 has places 1 and 3, peer 1 place 2, peer 2 place 0; each brings two rows, the missing ones empty.
    assert part.order.tolist() == [4, 0, 2, 1]
    assert part.context.positions.tolist() == [[*range(7), 0, 1]] * 2


def test_one_peer_changes_nothing(work) -> None:
    plain, split = model(work / "tied"), model(work / "tied")
    parallel = context_parallel.ContextParallel(split, dist.group.WORLD)
    ids, positions = torch.arange(3, 15).reshape(2, 6), torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    part = parallel.split(ids, positions, np.array([0, 1]), np.array([4, 2]))
    with torch.no_grad():
        wanted = plain(ids, position_ids=positions, use_cache=False).logits  # a cache hides what is packed
        got = split(part.ids, position_ids=part.positions, context=part.context).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(parallel.gather(part, got[[0, 1], [4, 2]]), wanted[[0, 1], [4, 2]], rtol=0, atol=1e-6)


def test_models_that_look_beyond_a_token_otherwise_are_refused(work) -> None:
    eager = model(work / "tied")
    eager.set_attn_implementation("eager")
    stretched = model(work / "tied")
    stretched.config.rope_parameters = {"rope_type": "dynamic"}
    linear = model(work / "tied")
    linear.config.layer_types = ["linear_attention", "full_attention"]
    for refused, why in [(eager, "eager"), (stretched, "longest row"), (linear, "kind linear_attention")]:
        with pytest.raises(EngineError, match=why):
            context_parallel.ContextParallel(refused, dist.group.WORLD)


def model(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
