"""A shopper that knows the goal: for demonstrations, and to show that goals can be reached."""

from __future__ import annotations

from rollcli.data.webshop.goals import Goal
from rollcli.data.webshop.pages import BACK, BUY, NEXT, PER_PAGE, PREVIOUS, Visit
from rollcli.data.webshop.products import Product
from rollcli.data.webshop.reward import color, similar


def next_action(goal: Goal, visit: Visit) -> tuple[str, str]:
    """Returns what leads to the goal from wherever the visit is.

    It searches by the product's title, turns pages until the product is there, chooses the goal's options and buys. A
    product that no page of results has is beyond it: it then takes the first result.
    """
    if visit.words is None:
        return "search", search_words(goal)
    if visit.product is None:
        return _from_results(goal, visit)
    if visit.text or (visit.product.asin != goal.asin and not _is_beyond(goal, visit)):
        return "click", PREVIOUS
    for name, value in wanted_options(goal, visit.product).items():
        if visit.options.get(name) != value:
            return "click", value
    return "click", BUY


def search_words(goal: Goal) -> str:
    """Returns the title without brackets, which would end the action."""
    return " ".join(goal.name.replace("[", " ").replace("]", " ").lower().split())


def wanted_options(goal: Goal, product: Product) -> dict[str, str]:
    """Returns, for each option of a product, the value that the goal names, or one much like it."""
    chosen = {}
    for name, values in product.options.items():
        exact = [value for value in values if value in goal.options]
        near = [value for value in values if any(similar(color(each), color(value)) for each in goal.options)]
        if exact or near:
            chosen[name] = (exact or near)[0]
    return chosen


def _from_results(goal: Goal, visit: Visit) -> tuple[str, str]:
    """Returns the click that leads to the product, page by page."""
    place = next((place for place, each in enumerate(visit.results) if each.asin == goal.asin), None)
    if place is None and _is_beyond(goal, visit):
        place = 0
    if place is None or not visit.results:
        return "click", BACK
    if visit.results[place] in visit.shown():
        return "click", visit.results[place].asin
    return "click", NEXT if place >= visit.page * PER_PAGE else PREVIOUS


def _is_beyond(goal: Goal, visit: Visit) -> bool:
    """Returns whether the search by the title did not find the product."""
    return visit.words == search_words(goal) and all(each.asin != goal.asin for each in visit.results)
