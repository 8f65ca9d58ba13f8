"""Goals of the source: apart by split, the same in every run, demonstrated by turns, checked before anything starts."""

import json
import os
from pathlib import Path

import pytest

from rollcli.data.sources.webshop import WebShopSource
from rollcli.data.webshop.pages import parse_action
from rollcli.errors import DatasetNotFound

DATA = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[3].parent / "shared" / "data") / "webshop"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no WebShop data")


def product(number: int, **other):
    return {
        "asin": f"B{number:09d}", "name": f"Tea {number}", "category": "x", "query": "tea", "product_category": "a › b",
        "pricing": [5.0], "attributes": ["mild"], "instruction": f"Find tea {number}",
        "instruction_attributes": ["mild"],
    } | other  # fmt: skip


@needs_data
def test_goals_are_apart_by_product_and_the_same_in_every_run() -> None:
    source = WebShopSource(str(DATA))
    train, test = source.open("train", 1), source.open("test", 1)
    assert train.size + test.size == 6435
    asins = [{items[place].payload["goal"]["asin"] for place in range(items.size)} for items in (train, test)]
    assert not asins[0] & asins[1] and len(asins[0] | asins[1]) == 216
    again = WebShopSource(str(DATA)).open("train", 2)
    assert again.fingerprint == train.fingerprint and again[7] == train[7]
    other = WebShopSource(str(DATA), price_seed=1).open("train", 1)
    assert other.fingerprint != train.fingerprint
    assert [other[n].payload["goal"]["price_limit"] for n in range(0, 4000, 50)] != [
        train[n].payload["goal"]["price_limit"] for n in range(0, 4000, 50)
    ]


@needs_data
def test_a_problem_opens_with_the_search_page() -> None:
    problem = WebShopSource(str(DATA), prompt="Shop.\n{state}", separator=" | ").open("train", 0)[0]
    wish = problem.payload["goal"]["instruction"]
    text = f"Shop.\nWebShop | Instruction: | {wish} | Search\nAvailable actions: search[words]"
    assert problem.messages == [{"role": "user", "content": text}]
    assert "response" not in problem.payload and json.dumps(problem.payload)


@needs_data
def test_demonstrated_turns_lead_to_a_purchase() -> None:
    pytest.importorskip("bm25s")
    pytest.importorskip("Stemmer")
    pytest.importorskip("rapidfuzz")
    items = WebShopSource(str(DATA), demonstrate=True, goals_per_product=1, expert_share=0.7).open("train", 3)
    assert items.size is None
    problems = [items[number] for number in range(40)]
    assert problems == [items[number] for number in range(40)]
    said = [problem.payload["response"] for problem in problems]
    assert all(text.startswith("<action>") and parse_action(text) for text in said)
    kinds = {parse_action(text)[0] for text in said} | {"buy" for text in said if "Buy Now" in text}
    assert kinds == {"search", "click", "buy"}
    for problem in problems:
        assert [message["role"] for message in problem.messages[:2]] in (["user"], ["user", "assistant"])
        assert problem.messages[-1]["role"] == "user"
        action = parse_action(problem.payload["response"])
        listed = problem.messages[-1]["content"].rpartition("Available actions: ")[2]
        assert action[0] == "search" or f"click[{action[1]}]" in listed


def test_written_goals_are_divided_as_in_the_original(tmp_path) -> None:
    products = [product(number) for number in range(1600)]
    goal = {"instruction": "tea.", "instruction_attributes": ["mild"], "instruction_options": []}
    (tmp_path / "items_shuffle.json").write_text(json.dumps(products))
    (tmp_path / "items_human_ins.json").write_text(json.dumps({each["asin"]: [goal] for each in products}))
    train, test = (WebShopSource(str(tmp_path)).open(split, 0) for split in ("train", "test"))
    assert (train.size, test.size) == (100, 500)
    asins = [{items[place].payload["goal"]["asin"] for place in range(items.size)} for items in (train, test)]
    assert len(asins[0]) == 100 and len(asins[1]) == 500 and not asins[0] & asins[1]
    by_product = WebShopSource(str(tmp_path), held_out="product")
    sizes = by_product.open("train", 0).size, by_product.open("test", 0).size
    assert sum(sizes) == 1600 and 120 <= sizes[1] <= 200
    assert WebShopSource(str(tmp_path), goals="synthetic").open("test", 0).size == sizes[1]
    with pytest.raises(DatasetNotFound, match=r"no goal .* train split"):
        WebShopSource(str(tmp_path), max_products=800).open("train", 0)


def test_what_is_missing_is_said(tmp_path) -> None:
    with pytest.raises(DatasetNotFound, match="no folder"):
        WebShopSource(str(tmp_path / "none")).open("train", 0)
    (tmp_path / "products.json").write_text(json.dumps([product(1, instruction=None)]))
    with pytest.raises(DatasetNotFound, match="goals: human"):
        WebShopSource(str(tmp_path), goals="human").open("train", 0)
    with pytest.raises(DatasetNotFound, match="no goal"):
        WebShopSource(str(tmp_path)).open("train", 0)


def test_options_without_sense_are_named() -> None:
    source = WebShopSource(
        "x", held_out_share=1.0, expert_share=2.0, max_products=0, prompt="go", demonstrated_answer="go",
        goals="synthetic", held_out="original",
    )  # fmt: skip
    assert {key for key, _ in source.problems()} == {
        "held_out_share", "expert_share", "max_products", "prompt", "demonstrated_answer", "held_out",
    }  # fmt: skip
