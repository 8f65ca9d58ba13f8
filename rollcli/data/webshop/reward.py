"""The reward of a purchase (WebShop, arXiv 2207.01206, §3.1 and its `get_reward`, web_agent_site/engine/goal.py).

    r = r_type · (attributes matched + options matched + [price ≤ limit]) / (attributes + options + 1)

Two things differ from the original. Nouns of titles come from a list of words, not from spaCy (nouns.py). And no more
matched options count than the goal names: there, options that nobody asked for can make up for what is missing, and
bring r above 1. Texts are compared as there, by the `token_set_ratio` that `thefuzz` takes from `rapidfuzz`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollcli.data.webshop.goals import Goal
from rollcli.data.webshop.nouns import nouns
from rollcli.data.webshop.products import Product
from rollcli.errors import PluginError

SIMILAR_ABOVE = 85
"""Similarity in percent above which texts match."""
_EXACT = ("size",)
_LATIN = dict.fromkeys(range(128, 256))
# The color words of the original, in its order: the first that a text contains stands for the text.
_COLORS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo "
    "caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream "
    "crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather "
    "indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha "
    "multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal "
    "rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise "
    "violet walnut wheat white wine yellow"
).split()


@dataclass(frozen=True)
class Score:
    """A purchase against its goal.

    Attributes:
        total: the reward, in [0, 1].
        attributes: share of the goal's attributes that the product has.
        options: share of the goal's options that were chosen; None where it names none.
        price: 1 when the price is within the limit, else 0.
        type: 1, 0.5, 0.1 or 0: how much it is the kind of product.
    """

    total: float
    attributes: float
    options: float | None
    price: float
    type: float

    def metrics(self) -> dict[str, float]:
        """Returns the parts that there are, by name."""
        parts = {"attributes": self.attributes, "price": self.price, "type": self.type}
        return parts if self.options is None else {**parts, "options": self.options}


def score(goal: Goal, product: Product, price: float, options: Mapping[str, str]) -> Score:
    """Returns what a purchase is worth.

    Args:
        goal: what was wanted.
        product: what was bought.
        price: what it cost, in dollars.
        options: chosen value of each option that was clicked.

    Raises:
        PluginError: the library that compares texts is not installed.
    """
    attributes = _attributes_matched(goal, product)
    chosen = min(_options_matched(goal, product, options), len(goal.options))
    cheap = float(price <= goal.price_limit)
    kind = type_reward(goal, product)
    total = kind * (attributes + chosen + cheap) / (len(goal.attributes) + len(goal.options) + 1)
    share = chosen / len(goal.options) if goal.options else None
    return Score(total, attributes / len(goal.attributes), share, cheap, kind)


def type_reward(goal: Goal, product: Product) -> float:
    """Returns 1 for a product found by the same query, in two categories of the goal's, or whose title has more than a
    fifth of the nouns of the goal's; else 0.5. Below a tenth of the nouns it is 0.1, with none of them 0."""
    wanted = nouns(goal.name)
    shared = len(wanted & nouns(product.name)) / len(wanted) if wanted else 0.2
    if shared == 0:
        return 0.0
    if shared < 0.1:
        return 0.1
    categories = _categories(goal.product_category) & _categories(product.product_category)
    return 1.0 if product.query == goal.query or len(categories) >= 2 or shared > 0.2 else 0.5


def color(text: str) -> str:
    """Returns the first color word, in the order of the list, that a text contains; else the text."""
    return next((word for word in _COLORS if word in text), text)


def similar(first: str, second: str) -> bool:
    """Returns whether the words of one text are, nearly, among the words of the other."""
    fuzz, utils = _rapidfuzz()
    ratio = fuzz.token_set_ratio(
        first.translate(_LATIN), second.translate(_LATIN), processor=utils.default_process
    )  # fmt: skip
    return round(ratio) > SIMILAR_ABOVE


def _attributes_matched(goal: Goal, product: Product) -> int:
    texts = _texts(product)
    return sum(
        any(similar(own, wanted) for own in product.attributes) or any(wanted in text for text in texts)
        for wanted in goal.attributes
    )


def _options_matched(goal: Goal, product: Product, options: Mapping[str, str]) -> int:
    """Returns how many chosen values are the goal's, or stand in the texts of the product."""
    wanted, texts = [color(value) for value in goal.options], _texts(product)
    count = 0
    for name, value in options.items():
        chosen = color(value)
        if name.lower() in _EXACT:
            matched = chosen in wanted
        else:
            matched = any(similar(each, chosen) for each in wanted)
        count += matched or any(chosen in text for text in texts)
    return count


def _texts(product: Product) -> tuple[str, str, str]:
    return product.name.lower(), " ".join(product.features).lower(), product.description.lower()


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def _rapidfuzz() -> tuple[Any, Any]:
    try:
        from rapidfuzz import fuzz, utils
    except ImportError as error:
        raise PluginError(
            f"WebShop's reward compares texts with `rapidfuzz`, which does not import: {error}",
            hint="pip install 'rollcli[webshop]'",
        ) from error
    return fuzz, utils
