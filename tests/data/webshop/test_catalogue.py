"""A folder's files are found or missed by name, loaded once, and searched by BM25."""

import json
import math
import threading
from collections import Counter

import pytest

from rollcli.data.webshop import catalogue
from rollcli.data.webshop.catalogue import Catalogue, Files, find_files, load
from rollcli.data.webshop.products import Product
from rollcli.errors import DatasetNotFound


def product(number: int, name: str, description: str = "", features=(), options=None) -> Product:
    return Product(
        f"B{number}", name, "x", "q", "a › b", description, tuple(features), (), options or {}, (1.0,), "", None, ()
    )  # fmt: skip


def write(folder, *names: str) -> None:
    row = {"asin": "B1", "name": "Tea", "category": "x", "query": "q", "product_category": "a"}
    for name in names:
        (folder / name).write_text(json.dumps([row]))


def test_files_are_found_by_the_names_of_the_original(tmp_path) -> None:
    write(tmp_path, "items_shuffle.json", "items_ins_v2.json", "items_human_ins.json", "human_goals.json")
    found = find_files(tmp_path, 5)
    assert found == Files(*(tmp_path / f"items_{name}.json" for name in ("shuffle", "ins_v2", "human_ins")), 5)
    write(tmp_path, "items_shuffle_1000.json")
    with pytest.raises(DatasetNotFound, match=r"several files of products: .*, items_shuffle_1000"):
        find_files(tmp_path)
    assert find_files(tmp_path, products="items_shuffle_1000.json").products == tmp_path / "items_shuffle_1000.json"


def test_what_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(DatasetNotFound, match="no folder"):
        find_files(tmp_path / "shop")
    with pytest.raises(DatasetNotFound, match="no product file: none of items_shuffle"):
        find_files(tmp_path)
    write(tmp_path, "products_1.json")
    assert find_files(tmp_path) == Files(tmp_path / "products_1.json")
    with pytest.raises(DatasetNotFound, match=r"no file .*goals\.json"):
        find_files(tmp_path, human="goals.json")


def test_threads_load_a_catalogue_once_and_few_are_kept(tmp_path, monkeypatch) -> None:
    reads = Counter()
    read = catalogue.read_products

    def count(path, *others):
        reads[path.name] += 1
        return read(path, *others)

    monkeypatch.setattr(catalogue, "read_products", count)
    monkeypatch.setattr(catalogue, "_loaded", type(catalogue._loaded)())
    write(tmp_path, "a.json", "b.json", "c.json")
    found = []
    threads = [threading.Thread(target=lambda: found.append(load(Files(tmp_path / "a.json")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1 and reads == {"a.json": 1}
    for name in ("b.json", "a.json", "c.json", "a.json", "b.json"):  # `c.json` drives `b.json` out, which is read again
        load(Files(tmp_path / name))
    assert reads == {"a.json": 1, "b.json": 2, "c.json": 1}


def test_search_ranks_as_bm25_does() -> None:
    pytest.importorskip("bm25s")
    pytest.importorskip("Stemmer")
    products = [
        product(1, "Red Shoes for Running", "shoe " * 5),
        product(2, "The Red Hat", options={"size": ("s", "shoe size")}),
        product(3, "Blue Towel", features=["soft", "red"]),  # the second feature is not searched
        product(4, "Green and Blue Scarf"),
    ]
    texts = ["red shoe run shoe shoe shoe shoe shoe", "red hat size s shoe size", "blue towel soft", "green blue scarf"]
    texts = [text.split() for text in texts]
    query, mean = ["red", "shoe"], sum(map(len, texts)) / 4

    def bm25(text) -> float:
        """Lucene's formula, written out."""
        total = 0.0
        for word in query:
            having = sum(word in other for other in texts)
            idf = math.log(1 + (4 - having + 0.5) / (having + 0.5))
            total += idf * text.count(word) / (text.count(word) + 0.9 * (1 - 0.4 + 0.4 * len(text) / mean))
        return total

    shop = Catalogue(products)
    assert [each.asin for each in shop.search("the RED shoes!")] == ["B1", "B2"]
    terms = shop._terms("the RED shoes!")
    assert terms == query
    assert shop._index.get_scores(terms) == pytest.approx([bm25(text) for text in texts], rel=1e-5)


def test_equal_products_keep_their_order_and_results_have_an_end() -> None:
    pytest.importorskip("bm25s")
    pytest.importorskip("Stemmer")
    shop = Catalogue([product(number, "Soap") for number in range(60)])
    assert [each.asin for each in shop.search("soaps")] == [f"B{number}" for number in range(50)]
    assert shop.search("") == shop.search("the of") == shop.search("tea") == []
