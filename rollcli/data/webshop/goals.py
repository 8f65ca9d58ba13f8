"""What a shopper is asked to buy: goals people wrote, and goals made from the attributes and options of a product.

Both are the original's (web_agent_site/engine/goal.py): a written goal has the attributes and options its writer named,
a synthetic one the wish of its product with each combination of the product's options. What is drawn at random, the
limit of the price, is drawn by (seed, product) alone, where the original draws anew in each process.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from rollcli.data.webshop.json_stream import object_members
from rollcli.data.webshop.products import Product
from rollcli.errors import DatasetNotFound

NO_LIMIT = 1_000_000.0
"""Limit of a goal that names none: there is no round price far enough above the product's."""
_LIMITS = [10.0 * tens for tens in range(1, 100)]
SHUFFLE_SEED, TEST_GOALS, TRAIN_FROM = 233, 500, 1500
"""How the original divides goals: shuffled with this seed, 0 … 499 are the test, 500 … 1499 the development set, which
is not used here, and the rest are trained on."""


@dataclass(frozen=True)
class Goal:
    """What is wanted.

    Attributes:
        asin: the product it was made for; any that fits is as good.
        name: title of that product, and so on as in `Product`.
        instruction: the wish as the shopper reads it.
        attributes: attributes wanted; at least one.
        options: values of options wanted, in lower case.
        price_limit: highest price in dollars.
    """

    asin: str
    name: str
    query: str
    product_category: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_limit: float

    def as_payload(self) -> dict[str, Any]:
        """Returns it as a task carries it."""
        return asdict(self)

    @classmethod
    def from_payload(cls, payload: dict[str, Any]) -> Goal:
        """Returns what `as_payload` gave."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in payload.items()})


class SyntheticGoals(Sequence[Goal]):
    """The goals of products that have a wish, one for each combination of options; made as they are asked for."""

    def __init__(self, products: Sequence[Product], price_seed: int, most_per_product: int | None = None) -> None:
        """Takes products; of one with more combinations than `most_per_product`, that many at equal distances."""
        self._products = [each for each in products if each.instruction and each.instruction_attributes]
        self._price_seed = price_seed
        self._combinations = [math.prod(map(len, each.options.values())) for each in self._products]
        taken = [min(count, most_per_product or count) for count in self._combinations]
        self._ends = list(accumulate(taken))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Goal: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Goal]: ...
    def __getitem__(self, index: int | slice) -> Goal | Sequence[Goal]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        at = bisect_right(self._ends, index)
        begin = self._ends[at - 1] if at else 0
        combination = (index - begin) * self._combinations[at] // (self._ends[at] - begin)
        product = self._products[at]
        chosen: dict[str, str] = {}
        for name in reversed(sorted(product.options)):
            combination, place = divmod(combination, len(product.options[name]))
            chosen[name] = product.options[name][place]
        wish = ", and ".join(f"{name}: {chosen[name]}" for name in sorted(chosen))
        limit, words = _price_limit(product, self._price_seed)
        text = f"{product.instruction}{' with ' + wish if wish else ''}{words}"
        options = tuple(chosen[name] for name in sorted(chosen))
        return _goal(product, text, product.instruction_attributes, options, limit)


def human_goals(products: Mapping[str, Product], path: Path, price_seed: int) -> list[Goal]:
    """Returns the goals people wrote (`items_human_ins.json`), in the order of the products.

    Those without an attribute are left out, as in the original.

    Args:
        products: by asin.
        path: object of `{asin: [{instruction, instruction_attributes, instruction_options}]}`.

    Raises:
        DatasetNotFound: the file cannot be read or is broken, or none of its goals is for one of the products.
    """
    written: dict[str, list[Goal]] = {}
    for where, asin, rows in object_members(path):
        if asin not in products:
            continue
        try:
            written[asin] = [
                _written(products[asin], row, price_seed, place)
                for place, row in enumerate(rows)
                if row["instruction_attributes"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise DatasetNotFound(
                f"{where}: goals of product `{asin}`: {type(error).__name__}: {error}",
                hint="each has `instruction`, `instruction_attributes` and `instruction_options`",
            ) from error
    goals = [goal for asin in products for goal in written.get(asin, ())]
    if not goals:
        raise DatasetNotFound(
            f"none of the goals in `{path}` is for one of the {len(products)} products",
            hint="take more products, or `goals: synthetic`",
        )
    return goals


def as_the_original(goals: list[Goal], split: str) -> list[Goal]:
    """Returns the goals of a split by the original's order and numbers."""
    shuffled = list(goals)
    random.Random(SHUFFLE_SEED).shuffle(shuffled)
    return shuffled[:TEST_GOALS] if split == "test" else shuffled[TRAIN_FROM:]


def _written(product: Product, row: dict[str, Any], price_seed: int, place: int) -> Goal:
    limit, words = _price_limit(product, price_seed, place)
    text = row["instruction"].strip(".") + words
    options = tuple(str(value) for value in row["instruction_options"])
    return _goal(product, text, tuple(row["instruction_attributes"]), options, limit)


def _goal(
    product: Product, text: str, attributes: tuple[str, ...], options: tuple[str, ...], limit: float
) -> Goal:  # fmt: skip
    return Goal(
        asin=product.asin,
        name=product.name,
        query=product.query,
        product_category=product.product_category,
        instruction=text,
        attributes=attributes,
        options=options,
        price_limit=limit,
    )


def _price_limit(product: Product, seed: int, place: int = 0) -> tuple[float, str]:
    """Returns the higher of two of the next four round prices above the product's, and the words that say it."""
    price = product.price(seed)
    above = [limit for limit in _LIMITS if limit > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(random.Random(f"{seed}/{product.asin}/{place}/limit").sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"
