"""A catalogue: its products and their search engine, loaded once in a process and shared by all its episodes.

Search is BM25 over what the original indexes (search_engine/convert_product_file_format.py): title, description, first
feature and options, with the constants and the stop words of its engine (Lucene by way of Pyserini: k1 0.9, b 0.4,
English stop words, Porter's stemmer). Ties are in the order of the file.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollcli.data.webshop.products import Product, read_products
from rollcli.errors import DatasetNotFound, PluginError

MOST_RESULTS = 50
"""Products a search returns at most."""
KEPT = 2
"""Catalogues a process keeps: the least recently used one beyond these goes. 100,000 products took half a GiB and their
index as much, 17 seconds in all."""
_STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")
_NAMES = {
    "products": ("items_shuffle.json", "items_shuffle_1000.json", "products*.json"),
    "attributes": ("items_ins_v2.json", "items_ins_v2_1000.json"),
    "human": ("items_human_ins.json",),
}
_loaded: OrderedDict[Files, Catalogue] = OrderedDict()
_loading = threading.Lock()


@dataclass(frozen=True)
class Files:
    """Which files make a catalogue.

    Attributes:
        products: array of products.
        attributes: their attributes and wishes; None where the products have them.
        human: goals people wrote, or None.
        most: products read from the beginning of the file; None reads all.
    """

    products: Path
    attributes: Path | None = None
    human: Path | None = None
    most: int | None = None


def find_files(folder: Path, most: int | None = None, **named: str | None) -> Files:
    """Returns the files of a folder: those named, or those with the names of the original.

    Args:
        folder: where they are.
        most: as in `Files`.
        named: file names in the folder, for `products`, `attributes` and `human`; None looks for one.

    Raises:
        DatasetNotFound: there is no folder or no product file, a named one is not there, or several fit.
    """
    if not folder.is_dir():
        raise DatasetNotFound(f"no folder `{folder}` with the files of WebShop", hint="check `path` of the source")
    found: dict[str, Path | None] = {}
    for role, patterns in _NAMES.items():
        if name := named.get(role):
            found[role] = folder / name
            if not found[role].is_file():
                raise DatasetNotFound(f"no file `{folder / name}`", hint=f"check `{role}_file` of the source")
            continue
        fitting = sorted(path for pattern in patterns for path in folder.glob(pattern))
        if len(fitting) > 1:
            names = ", ".join(path.name for path in fitting)
            raise DatasetNotFound(f"`{folder}` has several files of {role}: {names}", hint=f"name one: `{role}_file`")
        found[role] = fitting[0] if fitting else None
    if found["products"] is None:
        raise DatasetNotFound(
            f"folder `{folder}` has no product file: none of {', '.join(_NAMES['products'])}",
            hint="take the files that WebShop's `setup.sh` downloads, or name yours with `products_file`",
        )
    return Files(found["products"], found["attributes"], found["human"], most)


def load(files: Files) -> Catalogue:
    """Returns the catalogue of some files. The first call of a process reads them, others wait for it.

    Raises:
        DatasetNotFound: a file is not there or broken, with the place.
    """
    with _loading:
        if files not in _loaded:
            _loaded[files] = Catalogue(read_products(files.products, files.attributes, files.most))
        _loaded.move_to_end(files)
        while len(_loaded) > KEPT:
            _loaded.popitem(last=False)
        return _loaded[files]


class Catalogue:
    """Products, by identity and by search. It does not change, so threads may share it."""

    def __init__(self, products: list[Product]) -> None:
        self.products = products
        self.by_asin = {product.asin: product for product in products}
        self._indexing = threading.Lock()
        self._index: Any = None
        self._stem: Any = None

    def search(self, words: str) -> list[Product]:
        """Returns the products that fit best, at most `MOST_RESULTS`; none that has not one of the words.

        Raises:
            PluginError: the search library is not installed.
        """
        with self._indexing:
            if self._index is None:
                self._build()
            terms = sorted(set(self._terms(words)) & self._index.vocab_dict.keys())
        if not terms:
            return []
        scores = self._index.get_scores(terms)
        best = np.argsort(-scores, kind="stable")[:MOST_RESULTS]
        return [self.products[place] for place in best if scores[place] > 0]

    def _build(self) -> None:
        try:
            import bm25s
            import Stemmer
        except ImportError as error:
            raise PluginError(
                f"WebShop's search engine does not import: {error}", hint="pip install 'rollcli[webshop]'"
            ) from error
        self._stem = Stemmer.Stemmer("porter")
        index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
        index.index([self._terms(_searched(product)) for product in self.products], show_progress=False)
        self._index = index

    def _terms(self, text: str) -> list[str]:
        words = [word.removesuffix("'s").removesuffix("’s") for word in _WORD.findall(text.lower())]
        return self._stem.stemWords([word for word in words if word not in _STOP_WORDS])


def _searched(product: Product) -> str:
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.name, product.description, *product.features[:1], options])
