"""Products of a WebShop catalogue, in the form of the original's files or with lists in their places.

The original's `items_shuffle.json` has `customization_options: {name: [{value: …}]}` and `pricing: "$5.99$12.50"`; a
derived file may have `options: {name: [value, …]}` and `pricing: [5.99, 12.5]`. What is absent gets the original's
defaults (web_agent_site/engine/engine.py, `load_products`): a price of 100, no options, no description.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollcli.data.webshop.json_stream import array_members, object_members
from rollcli.errors import DatasetNotFound

REQUIRED = ("asin", "name", "category", "query", "product_category")
DEFAULT_PRICE = 100.0
"""Price of a product that has none."""
_LONGEST_ASIN = 10
_PRICE = re.compile(r"\$([^$]*)")


@dataclass(frozen=True, slots=True)
class Product:
    """One product.

    Attributes:
        asin: its identity.
        name: its title.
        category: the shop's department: `beauty`, `fashion`, …
        query: search word it was found by, in lower case.
        product_category: path of categories, separated by `›`.
        description: its text.
        features: the points of its list of features.
        attributes: what the reward compares with the attributes of a goal.
        options: values of each option, all in lower case.
        prices: its price, or the lowest and the highest, in dollars.
        rating: stars as text; `N.A.` without.
        instruction: a written wish that it fulfills, for goals that name options one by one; or None.
        instruction_attributes: the attributes that the wish names.
    """

    asin: str
    name: str
    category: str
    query: str
    product_category: str
    description: str
    features: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    prices: tuple[float, ...]
    rating: str
    instruction: str | None
    instruction_attributes: tuple[str, ...]

    @property
    def price_tag(self) -> str:
        """The price as pages show it."""
        return " to ".join(f"${price}" for price in self.prices)

    def price(self, seed: int) -> float:
        """Returns what it costs: of a range one price, drawn by (seed, product) alone."""
        if len(self.prices) == 1:
            return self.prices[0]
        return random.Random(f"{seed}/{self.asin}/price").uniform(*self.prices)


def read_products(path: Path, attributes: Path | None, most: int | None = None) -> list[Product]:
    """Returns the products of a file, the first of each identity.

    Args:
        path: array of products.
        attributes: object of `{asin: {attributes, instruction, instruction_attributes}}` (`items_ins_v2.json`), which
            go before the product's own; None without.
        most: only so many from the beginning of the file are looked at; None takes all.

    Raises:
        DatasetNotFound: a file cannot be read or is broken, or a product lacks what it needs; with the place.
    """
    found: dict[str, Product] = {}
    for number, (where, row) in enumerate(array_members(path)):
        if number == most:
            break
        _check(row, where)
        asin = row["asin"]
        if asin != "nan" and len(asin) <= _LONGEST_ASIN and asin not in found:
            found[asin] = _located(where, asin, _product, row)
    if not found:
        raise DatasetNotFound(f"product file `{path}` has no product", hint="check the file")
    for where, asin, row in object_members(attributes) if attributes is not None else ():
        if asin in found:
            found[asin] = replace(found[asin], **_located(where, asin, _described, row))
    return list(found.values())


def _check(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise DatasetNotFound(f"{where}: a product is an object, this is {type(row).__name__}", hint="mend the file")
    for name in REQUIRED:
        if not isinstance(row.get(name), str):
            raise _unfit(where, row.get("asin"), f"`{name}` should be a text, is {row.get(name)!r}")


def _located(where: str, asin: str, read: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> Any:
    """Returns what is read of a row; what does not fit is named by its place."""
    try:
        return read(row)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _unfit(where, asin, f"{type(error).__name__}: {error}") from error


def _product(row: dict[str, Any]) -> Product:
    """Returns a product of what is used of a row: images, sellers and reviews are most of the original's file."""
    features = row.get("small_description") or []
    plain = Product(
        asin=row["asin"],
        name=row["name"],
        category=sys.intern(row["category"]),
        query=sys.intern(row["query"].lower().strip()),
        product_category=sys.intern(row["product_category"]),
        description=str(row.get("full_description") or ""),
        features=tuple(map(str, features if isinstance(features, list) else [features])),
        attributes=("DUMMY_ATTR",),
        options=dict(_options(row)),
        prices=_prices(row.get("pricing")),
        rating=str(row.get("average_rating") or "N.A."),
        instruction=None,
        instruction_attributes=(),
    )
    return replace(plain, **_described(row))


def _described(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes and the wish that a row has; `row` is of either file."""
    if not isinstance(row, dict):
        raise TypeError(f"should be an object, is {row!r}")
    found: dict[str, Any] = {}
    if row.get("attributes") is not None:
        found["attributes"] = _texts(row, "attributes")
    if row.get("instruction") is not None:
        found["instruction"] = row["instruction"]
        found["instruction_attributes"] = _texts(row, "instruction_attributes")
    return found


def _texts(row: dict[str, Any], name: str) -> tuple[str, ...]:
    values = row.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"`{name}` should be a list of texts, is {values!r}")
    return tuple(map(sys.intern, values))


def _options(row: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields options as the original writes them: in lower case, ` | ` for a slash."""
    for name, values in (row.get("customization_options") or row.get("options") or {}).items():
        texts = [each["value"] if isinstance(each, dict) else each for each in values or ()]
        if texts:
            # Interned: a million products share the names of their colors and sizes.
            values = (sys.intern(text.strip().replace("/", " | ").lower()) for text in texts)
            yield sys.intern(name.lower()), tuple(values)


def _prices(pricing: Any) -> tuple[float, ...]:
    """Returns one price, or the lowest and the highest."""
    if not pricing:
        return (DEFAULT_PRICE,)
    if isinstance(pricing, str):
        pricing = [re.sub(r"[^\d.]", "", text) for text in _PRICE.findall(pricing)]
    prices = tuple(float(price) for price in pricing[:2])
    if not prices:
        raise ValueError("`pricing` names no price in dollars")
    return prices


def _unfit(where: str, asin: Any, why: str) -> DatasetNotFound:
    return DatasetNotFound(f"{where}: product `{asin}`: {why}", hint="mend the file, or leave the product out")
