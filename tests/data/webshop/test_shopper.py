"""The scripted shopper reaches its goals on the data, from wherever it is."""

import os
import random
from pathlib import Path

import pytest

from rollcli.data.webshop.catalogue import find_files, load
from rollcli.data.webshop.goals import SyntheticGoals
from rollcli.data.webshop.pages import Visit
from rollcli.data.webshop.reward import score
from rollcli.data.webshop.shopper import next_action, wanted_options

for package in ("bm25s", "Stemmer", "rapidfuzz"):
    pytest.importorskip(package)
DATA = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[3].parent / "shared" / "data") / "webshop"
if not DATA.is_dir():
    pytest.skip("no WebShop data", allow_module_level=True)


@pytest.fixture(scope="module")
def catalogue():
    return load(find_files(DATA))


def test_every_wish_of_the_data_is_fulfilled(catalogue) -> None:
    goals = SyntheticGoals(catalogue.products, 0, most_per_product=2)
    totals = []
    for goal in goals:
        visit, turns = Visit(catalogue, goal.instruction), 0
        while not visit.bought and turns < 20:
            assert visit.act(*next_action(goal, visit))
            turns += 1
        assert visit.product.asin == goal.asin
        totals.append(score(goal, visit.product, visit.product.price(0), visit.options).total)
    assert len(totals) > 350 and set(totals) == {1.0}


def test_it_finds_its_way_after_random_clicks(catalogue) -> None:
    goals = SyntheticGoals(catalogue.products, 0, most_per_product=1)
    draw = random.Random(0)
    for number in range(0, 200, 10):
        goal = goals[number]
        visit = Visit(catalogue, goal.instruction)
        visit.act("search", draw.choice(["shoes", goal.query, "qqq"]))
        for _ in range(6):
            visit.act("click", draw.choice([each for each in visit.clickable() if each != "Buy Now"] or [""]))
        for _ in range(20):
            if not visit.bought:
                assert visit.act(*next_action(goal, visit))
        assert visit.bought and visit.product.asin == goal.asin
        assert score(goal, visit.product, 0.0, visit.options).total == 1.0


def test_options_that_people_wrote_are_found_by_likeness(catalogue) -> None:
    product = next(each for each in catalogue.products if "black | white" in each.options.get("color", ()))
    goal = SyntheticGoals([product], 0)[0] if product.instruction else None
    assert goal is not None
    wish = type(goal)(**{**goal.as_payload(), "options": ("white black",)})
    assert wanted_options(wish, product)["color"] == "black | white"


def test_what_the_search_does_not_find_ends_with_the_first_result(catalogue) -> None:
    goal = SyntheticGoals(catalogue.products, 0)[0]
    visit = Visit(catalogue, goal.instruction)
    stranger = type(goal)(**{**goal.as_payload(), "asin": "B000000000"})
    for _ in range(20):
        if not visit.bought:
            assert visit.act(*next_action(stranger, visit))
    assert visit.bought and visit.product == visit.results[0]
