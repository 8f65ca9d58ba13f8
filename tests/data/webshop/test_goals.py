"""Goals as the original makes them, with prices that depend on the seed alone."""

import json
import random

import pytest

from rollcli.data.webshop.goals import NO_LIMIT, Goal, SyntheticGoals, as_the_original, human_goals
from rollcli.data.webshop.products import Product
from rollcli.errors import DatasetNotFound


def product(asin="B1", price=5.0, options=None, wish="Find me soft shirts", attributes=("soft",)) -> Product:
    options = {"size": ("s", "m"), "color": ("red", "blue", "tan")} if options is None else options
    return Product(
        asin, "Shirt", "fashion", "shirts", "A › B", "", (), ("soft",), options, (price,), "N.A.", wish, attributes
    )  # fmt: skip


def test_a_synthetic_goal_is_the_wish_with_each_combination_of_options() -> None:
    goals = SyntheticGoals([product(wish=None), product(), product("B2", options={}), product(attributes=())], 0)
    assert len(goals) == 7  # 3 colors × 2 sizes, and one without options
    wishes = [goal.instruction.partition(", and price")[0] for goal in goals]
    # Names in order, the last one fastest, as itertools.product over sorted names.
    expected = [(color, size) for color in ("red", "blue", "tan") for size in ("s", "m")]
    assert wishes[:6] == [f"Find me soft shirts with color: {color}, and size: {size}" for color, size in expected]
    assert [goal.options for goal in goals][:6] == expected
    assert wishes[6] == "Find me soft shirts" and goals[6].options == ()


def test_a_product_gives_no_more_goals_than_asked_at_equal_distances() -> None:
    goals = SyntheticGoals([product(), product("B2", options={"size": ("s", "m")})], 0, most_per_product=3)
    # Of combinations 0 … 5 those at 0, 2, 4; of two both.
    assert [goal.options for goal in goals] == [("red", "s"), ("blue", "s"), ("tan", "s"), ("s",), ("m",)]
    with pytest.raises(IndexError):
        goals[5]


def test_the_limit_is_one_of_the_next_four_tens_but_the_first() -> None:
    limits = {seed: SyntheticGoals([product(price=12.0)], seed)[0].price_limit for seed in range(60)}
    # Above 12: 20, 30, 40, 50; the higher of two different ones is never 20.
    assert set(limits.values()) == {30.0, 40.0, 50.0}
    goal = SyntheticGoals([product(price=12.0)], 7)[3]
    assert goal.price_limit == limits[7]
    assert goal.instruction.endswith(f", and price lower than {limits[7]:.2f} dollars")


def test_a_price_near_a_thousand_leaves_no_limit() -> None:
    # Above 980 there is 990 alone, and two are needed.
    goal = SyntheticGoals([product(price=980.0, options={})], 0)[0]
    assert goal.price_limit == NO_LIMIT and goal.instruction == "Find me soft shirts"


def test_a_goal_travels_as_a_task_carries_it() -> None:
    goal = SyntheticGoals([product()], 0)[0]
    assert Goal.from_payload(json.loads(json.dumps(goal.as_payload()))) == goal


def written(tmp_path, rows) -> list[Goal]:
    path = tmp_path / "items_human_ins.json"
    path.write_text(json.dumps(rows))
    return human_goals({"B2": product("B2"), "B1": product()}, path, 0)


def test_goals_that_people_wrote(tmp_path) -> None:
    row = {"instruction": "i want a soft shirt.", "instruction_attributes": ["soft"], "instruction_options": ["red"]}
    goals = written(tmp_path, {"B1": [row, row | {"instruction_attributes": []}], "B2": [row], "B9": [row]})
    assert [goal.asin for goal in goals] == ["B2", "B1"]  # in the order of the products; those without are left out
    assert goals[0].instruction.startswith("i want a soft shirt, and price lower than ")
    assert (goals[0].attributes, goals[0].options) == (("soft",), ("red",))


def test_broken_or_foreign_goals_are_named(tmp_path) -> None:
    with pytest.raises(DatasetNotFound, match=r"items_human_ins.json:1:2: goals of product `B1`: KeyError"):
        written(tmp_path, {"B1": [{"instruction": "x"}]})
    with pytest.raises(DatasetNotFound, match="none of the goals"):
        written(tmp_path, {"B9": []})


def test_the_originals_split_is_by_number_after_its_shuffle() -> None:
    goals = list(range(1600))
    order = list(range(1600))
    random.seed(233)
    random.shuffle(order)
    assert as_the_original(goals, "test") == order[:500]
    assert as_the_original(goals, "train") == order[1500:]
