"""The parts of the reward; whole sessions, worked by hand, are in tests/environments/test_webshop.py."""

import pytest

from rollcli.data.webshop.goals import Goal
from rollcli.data.webshop.products import Product
from rollcli.data.webshop.reward import color, score, similar, type_reward

pytest.importorskip("rapidfuzz")


def product(name="Acme Cotton Shirt", query="shirts", path="Clothing › Men › Shirts", **other) -> Product:
    fields = {"description": "", "features": (), "attributes": ("soft",), "options": {}, "prices": (5.0,)}
    return Product(
        "B1", name, "fashion", query, path, **(fields | other), rating="", instruction=None, instruction_attributes=()
    )


def goal(name="Acme Cotton Shirt", query="shirts", path="Clothing › Men › Shirts", **other) -> Goal:
    return Goal("B1", name, query, path, "", **({"attributes": ("soft",), "options": (), "price_limit": 10.0} | other))


@pytest.mark.parametrize(
    "text, expected",
    # The first in the order of the list, not of the text: `lavender` stands before `violet`, `fuchsia` before `ivy`.
    [("black forest", "black"), ("violet lavender", "lavender"), ("steelivy fuchsia", "fuchsia"), ("shop", "shop")],
)
def test_a_color_word_stands_for_its_text(text, expected) -> None:
    assert color(text) == expected


@pytest.mark.parametrize(
    "first, second, expected",
    [
        ("Machine Wash", "machine-wash", True),  # punctuation and case do not count
        ("wash machine cold", "machine wash", True),  # all words of one are words of the other: 100
        ("machine washable", "machine wash", True),  # 2·12 of 16 + 12 letters are shared: 85.7, rounded 86
        ("machine washables", "machine wash", False),  # 2·12 of 17 + 12: 82.8
        ("café", "caf", True),  # Latin letters beyond ASCII are left out, as in `thefuzz`
        ("", "x", False),
    ],
)
def test_texts_are_similar_above_85(first, second, expected) -> None:
    assert similar(first, second) is similar(second, first) is expected


@pytest.mark.parametrize(
    "bought, expected",
    [
        (product(), 1.0),
        (product(name="Cotton Towel", query="towels", path="Bath"), 1.0),  # 1 of 3 nouns
        (product(name="Bolt Towel"), 0.0),  # no noun, though query and categories are the same
    ],
)
def test_a_product_is_of_the_kind_by_query_categories_or_title(bought, expected) -> None:
    assert type_reward(goal(), bought) == expected


def test_few_shared_nouns_need_query_or_two_categories() -> None:
    wanted = goal(name="Acme Cotton Shirt Collar Button")  # 5 nouns, of which `Acme` is a fifth
    other = {"name": "Acme Lamp", "query": "lamps", "path": "Home › Men"}
    assert type_reward(wanted, product(**other)) == 0.5
    assert type_reward(wanted, product(**other | {"query": "shirts"})) == 1.0
    assert type_reward(wanted, product(**other | {"path": "Shirts › Men"})) == 1.0  # whatever their order


def test_attributes_are_looked_for_in_texts_too() -> None:
    wanted = goal(attributes=("soft", "machine wash", "made in usa", "dry clean", "cheap"))
    bought = product(features=("Machine wash", "x"), description="MADE IN USA", name="Acme Dry Clean Shirt")
    assert score(wanted, bought, 5.0, {}).attributes == 4 / 5


def test_sizes_match_exactly_and_other_options_nearly() -> None:
    wanted = goal(options=("x-large", "green apple"))
    # `x-large` is no `xx-large`; a flavor of the same words is the same.
    assert score(wanted, product(), 5.0, {"size": "xx-large", "flavor": "apple green"}).options == 1 / 2
    assert score(wanted, product(), 5.0, {"Size": "x-large"}).options == 1 / 2
    assert score(wanted, product(), 5.0, {}).options == 0
    assert score(goal(), product(), 5.0, {"flavor": "mint"}).options is None


def test_the_price_may_be_the_limit() -> None:
    assert [score(goal(), product(), price, {}).price for price in (10.0, 10.01)] == [1.0, 0.0]
