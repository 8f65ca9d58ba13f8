"""Sessions in a shop of six products, their rewards worked by hand, and what an episode reports."""

import asyncio
import json

import pytest

from rollcli.data.carriers import Task
from rollcli.environments.blocking import perform
from rollcli.environments.webshop import WebShop
from rollcli.errors import DatasetNotFound

for package in ("bm25s", "Stemmer", "rapidfuzz"):
    pytest.importorskip(package)


def row(number, name, query, path, attributes, price, options=None, features=()):
    return {
        "asin": f"B00000000{number}", "name": name, "category": "x", "query": query, "product_category": path,
        "attributes": attributes, "pricing": [price], "options": options or {}, "small_description": list(features),
        "full_description": "",
    }  # fmt: skip


SHIRT, LINEN, BOTTLE, TEA, JACKET, HANGER = (f"B00000000{number}" for number in range(1, 7))
PRODUCTS = [
    row(1, "Acme Men's Cotton Running Shirt", "men's shirts", "Clothing › Men › Shirts", ["machine wash"], 25.0,
        {"Color": ["Red", "Blue"], "Size": ["Small", "Large"]}, ["Moisture wicking", "Also in large"]),
    row(2, "Bolt Women's Linen Shirt", "women's shirts", "Clothing › Women › Shirts", ["machine washable"], 45.0,
        {"Color": ["Dark Red", "Green"], "Size": ["Small"]}),
    row(3, "Acme Steel Bottle", "bottles", "Kitchen › Bottles", ["leak proof"], 15.0),
    row(4, "Zen Oolong Tea", "tea", "Grocery › Tea", ["machine wash"], 5.0),
    row(5, "Mega Kids Winter Jacket Hood Zipper Pocket Fleece Lining Snow Ski Coat", "jackets", "Clothing", [], 9),
    row(6, "Coat Hanger", "hangers", "Home › Storage", ["fleece lining"], 10.0),
]  # fmt: skip
# Nouns of the shirt's title: acme, men, cotton, running, shirt. Its goal has 2 + 2 + 1 parts.
WISH = {
    "asin": SHIRT, "name": PRODUCTS[0]["name"], "query": "men's shirts", "product_category": "Clothing › Men › Shirts",
    "instruction": "a red shirt", "attributes": ["machine wash", "moisture wicking"], "options": ["red", "small"],
    "price_limit": 30.0,
}  # fmt: skip
COAT = WISH | {"name": PRODUCTS[4]["name"], "query": "jackets", "product_category": "Clothing › Kids", "options": []}
SESSIONS = {
    # Everything: (2 + 2 + 1) / 5 · 1.
    "all": (WISH, SHIRT, ["red", "small"], 1.0, {"attributes": 1, "options": 1, "price": 1, "type": 1}),
    # No option chosen: (2 + 0 + 1) / 5.
    "no options": (WISH, SHIRT, [], 0.6, {"options": 0}),
    # Blue is neither red nor in a text; small fits: (2 + 1 + 1) / 5.
    "wrong color": (WISH, SHIRT, ["blue", "small"], 0.8, {"options": 0.5}),
    # 25 is more than 20: (2 + 2 + 0) / 5.
    "too dear": (WISH | {"price_limit": 20.0}, SHIRT, ["red", "small"], 0.8, {"price": 0}),
    # Type: 1 of 5 nouns is not enough, categories Clothing and Shirts are: 1. Machine washable is 86 % machine wash,
    # and wicking nowhere: 1. `Dark red` counts as dark, not red; small fits: 1. 45 is more than 30: (1 + 1 + 0) / 5.
    "other shirt": (
        WISH, LINEN, ["dark red", "small"], 0.4, {"attributes": 0.5, "options": 0.5, "price": 0, "type": 1},
    ),
    # Acme is 1 of 5 nouns, no more; neither query nor categories fit: (0 + 0 + 1) / 5 · 0.5.
    "wrong kind, same brand": (WISH, BOTTLE, [], 0.1, {"type": 0.5, "attributes": 0}),
    # No noun in common: 0, whatever else fits.
    "nothing like it": (WISH, TEA, [], 0.0, {"type": 0, "attributes": 0.5, "price": 1}),
    # Coat is 1 of 12 nouns, less than a tenth: (1 + 0 + 1) / (1 + 0 + 1) · 0.1.
    "hardly like it": (COAT | {"attributes": ["fleece lining"]}, HANGER, [], 0.1, {"type": 0.1}),
    # Large is not asked for, yet stands in the features: 2 matches, of which the goal's 1 count:
    # (1 + 1 + 1) / (2 + 1 + 1); the original's 4 / 4 would hide that waterproof is missing.
    "more options than asked": (
        WISH | {"attributes": ["machine wash", "waterproof"], "options": ["red"]}, SHIRT, ["red", "large"], 0.75,
        {"options": 1, "attributes": 0.5},
    ),
    # A title without nouns counts as a fifth shared, too little without query or categories: (1 + 1) / 2 · 0.5.
    "no nouns": (
        WISH | {"name": "2 in 1", "attributes": ["leak proof"], "options": []}, BOTTLE, [], 0.5, {"type": 0.5},
    ),
    # … and by its query it is the kind.
    "no nouns, same query": (
        WISH | {"name": "2 in 1", "query": "bottles", "attributes": ["leak proof"], "options": []}, BOTTLE, [], 1.0, {},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    path = tmp_path_factory.mktemp("shop") / "products.json"
    path.write_text(json.dumps(PRODUCTS))
    return {"products": str(path), "attributes": None, "human": None, "most": None}


def enter(shop, goal=WISH, **options) -> WebShop:
    style = {
        "separator": " | ", "show_attributes": False, "repeat_instruction": False, "list_actions": True,
        "longest_text": 100,
    }  # fmt: skip
    payload = {"goal": goal, "shop": shop, "style": style, "price_seed": 0}
    environment = WebShop(**options)
    messages = [{"role": "user", "content": "welcome"}]
    assert environment.reset(Task("t", 0, messages, payload)) == messages
    return environment


@pytest.mark.parametrize("name", SESSIONS)
def test_rewards_are_those_worked_by_hand(shop, name) -> None:
    goal, asin, options, reward, parts = SESSIONS[name]
    environment = enter(shop, goal)
    title = next(product["name"] for product in PRODUCTS if product["asin"] == asin)
    for action in (f"search[{title}]", f"click[{asin}]", *(f"click[{value}]" for value in options)):
        result = environment.step(f"<action>{action}</action>")
        assert (result.done, result.reward, result.metrics["invalid_actions"]) == (False, 0.0, 0.0)
    last = environment.step("Action: click[Buy Now]")
    assert last.done and last.messages == [] and last.reward == pytest.approx(reward)
    assert last.metrics["score"] == pytest.approx(reward) and last.metrics["success"] == float(reward == 1)
    assert {part: last.metrics[part] for part in parts} == pytest.approx(parts)
    assert ("options" in last.metrics) == bool(goal["options"])
    assert (last.metrics["ended_bought"], last.fields["done_reason"]) == (1.0, "bought")


def test_options_without_sense_are_named() -> None:
    assert [key for key, _ in WebShop(max_turns=0, invalid_reward=float("nan")).problems()] == [
        "max_turns", "invalid_reward",
    ]  # fmt: skip


def test_weights_of_score_success_and_invalid_actions(shop) -> None:
    environment = enter(shop, score_weight=2.0, success_reward=3.0, invalid_reward=-0.05)
    assert environment.step("hello").reward == environment.step("click[Buy Now]").reward == -0.05
    for action in ("search[acme cotton shirt]", f"click[{SHIRT}]", "click[red]", "click[small]"):
        assert environment.step(action).reward == 0.0
    assert environment.step("click[buy now]").reward == 5.0


def test_an_invalid_action_is_told_counted_and_changes_nothing(shop) -> None:
    environment = enter(shop)
    environment.step("search[shirt]")
    key = environment.state_key()
    for said in ("", "click[B99]", "click[Next >]", "think[x]", "search[]", "<action>buy</action>"):
        result = environment.step(said)
        told = result.messages[0]["content"]
        assert told.startswith("That is none of the available actions.\nBack to Search | Page 1")
        assert environment.state_key() == key and not result.done
    assert result.metrics["invalid_actions"] == 6.0 and result.metrics["turns"] == 7.0


def test_a_visit_without_a_purchase_ends_with_its_turns(shop) -> None:
    environment = enter(shop, max_turns=2)
    environment.step("search[shirt]")
    last = environment.step(f"click[{SHIRT}]")
    assert last.done and last.reward == 0.0 and last.fields["done_reason"] == "max_turns"
    assert (last.metrics["success"], last.metrics["score"], last.metrics["ended_max_turns"]) == (0.0, 0.0, 1.0)
    assert "type" not in last.metrics


def test_episodes_share_a_catalogue_and_do_not_meet(shop) -> None:
    first, second = enter(shop), enter(shop)
    first.step("search[tea]")
    assert first.state_key() != second.state_key() == enter(shop).state_key()
    assert first._visit.catalogue is second._visit.catalogue


def test_it_is_called_in_threads_and_a_shop_that_is_gone_fails_its_episode(shop, tmp_path) -> None:
    async def play():
        environment = WebShop()
        payload = {"goal": WISH, "style": {}, "price_seed": 0, "shop": shop | {"products": str(tmp_path / "none")}}
        with pytest.raises(DatasetNotFound, match="cannot be read"):
            await perform(environment, "reset", Task("t", 0, [], payload))
        await perform(environment, "reset", Task("t", 0, [], payload | {"shop": shop}))
        result = await perform(environment, "step", "search[tea]")
        await perform(environment, "close")
        return result.messages[0]["content"]

    assert asyncio.run(play()).startswith(f"Back to Search [SEP] Page 1 (Total results: 1) [SEP] {TEA} [SEP] Zen")
