"""Maps are gymnasium's, transitions too, and the policy is the best."""

import pytest

from rollcli.data.games import frozen_lake
from rollcli.errors import DatasetNotFound


def test_maps_are_those_of_gymnasium() -> None:
    toy = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")
    for seed in range(20):
        assert list(frozen_lake.generate(5, 0.7, seed)) == toy.generate_random_map(5, 0.7, seed)


def test_the_best_policy_walks_the_shortest_way() -> None:
    rows = ("SFF", "FHF", "HFG")
    assert frozen_lake.policy(rows, is_slippery=False)[:3] == "RRD"
    assert frozen_lake.policy(rows, is_slippery=False)[5] == "D"


def test_on_slippery_ice_it_keeps_away_from_holes() -> None:
    # Beside the hole, walking into the far wall slips along it and never in.
    assert frozen_lake.policy(("SFF", "HHF", "FFG"), is_slippery=True)[:2] == "UU"


@pytest.mark.parametrize(
    ("text", "where"), [("SFX\nFFG", "lake:1"), ("SFF\nFG", "lake:2"), ("SH\nHG", "lake"), ("SS\nFG", "lake")]
)
def test_broken_maps_are_located(text: str, where: str) -> None:
    with pytest.raises(DatasetNotFound, match=f"^{where}:"):
        frozen_lake.parse(text, "lake")


def test_characters_of_the_map_are_the_recipes() -> None:
    assert frozen_lake.render(("SH", "FG"), 2, ".o*@") == ".o\n@*"
