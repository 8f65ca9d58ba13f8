"""WebShop's pages as text, and a visit that goes from page to page.

    search ──search[words]──▶ results ──click[asin]──▶ item ──click[Description]──▶ its text
                              ◀ < Prev, Next >         ◀ click[a value of an option], click[Buy Now]

Pages hold what those of the original's text environment hold (web_agent_site/envs/web_agent_text_env.py). A search
works from every page, as there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rollcli.data.games.moves import marked
from rollcli.data.webshop.catalogue import Catalogue
from rollcli.data.webshop.products import Product

PER_PAGE = 10
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
TEXTS = ("Description", "Features", "Reviews")
ATTRIBUTES = "Attributes"
_BEGIN = re.compile(r"\b(search|click)\s*\[", re.IGNORECASE)


@dataclass(frozen=True)
class PageStyle:
    """How pages look.

    Attributes:
        separator: between the parts of a page.
        show_attributes: items have a page that tells their attributes.
        repeat_instruction: every page begins with the wish, not the first alone.
        list_actions: a last line names the actions there are.
        longest_text: characters of a description, and of features, that are shown.
    """

    separator: str = " [SEP] "
    show_attributes: bool = False
    repeat_instruction: bool = False
    list_actions: bool = True
    longest_text: int = 2000


def parse_action(response: str) -> tuple[str, str] | None:
    """Returns the last action of a response as (`search` or `click`, its words); None when there is none.

    An action that is marked (`<action>…</action>`, `Action: …`) goes before any that is not.

    >>> parse_action("I could click[Buy Now]. <action>click[[2 pack] red]</action>")
    ('click', '[2 pack] red')
    """
    found = _last_action(marked(response)[0])
    return found or _last_action(response.rpartition("</think>")[2])


def _last_action(text: str) -> tuple[str, str] | None:
    for begin in reversed(list(_BEGIN.finditer(text))):
        words = _bracketed(text[begin.end() :].partition("\n")[0]).strip()
        if words:
            return begin.group(1).lower(), words
    return None


def _bracketed(rest: str) -> str:
    """Returns what stands before the bracket that closes; before the last one when they do not match up."""
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "[") - (character == "]")
        if not depth:
            return rest[:place]
    return rest.rpartition("]")[0]


def _plain(words: str) -> str:
    return " ".join(words.lower().split())


@dataclass
class Visit:
    """One shopper's visit.

    Attributes:
        catalogue: the shop.
        instruction: the wish.
        style: how pages look.
        words: what was searched for; None on the search page.
        results: what was found.
        page: number of the page of results, from 1.
        product: the item that is looked at, or None.
        options: values chosen for it.
        text: which of its texts is read, or ''.
        bought: True at the end.
    """

    catalogue: Catalogue
    instruction: str
    style: PageStyle = field(default_factory=PageStyle)
    words: str | None = None
    results: list[Product] = field(default_factory=list)
    page: int = 1
    product: Product | None = None
    options: dict[str, str] = field(default_factory=dict)
    text: str = ""
    bought: bool = False

    def act(self, kind: str, words: str) -> bool:
        """Takes an action; returns False, and changes nothing, when there is none like it on this page."""
        if kind == "search":
            self._leave()
            self.words, self.page = words.lower(), 1
            self.results = self.catalogue.search(self.words)
            return True
        meant = {_plain(each): each for each in self.clickable()}.get(_plain(words))
        if meant is None:
            return False
        self._click(meant)
        return True

    def clickable(self) -> list[str]:
        """Returns what can be clicked, in the order of the page."""
        if self.words is None:
            return []
        if self.product is None:
            turn = [PREVIOUS] * (self.page > 1) + [NEXT] * (self.page * PER_PAGE < len(self.results))
            return [BACK, *turn, *(product.asin for product in self.shown())]
        if self.text:
            return [BACK, PREVIOUS]
        values = [value for values in self.product.options.values() for value in values]
        return [BACK, PREVIOUS, *values, *self._texts(), BUY]

    def actions(self) -> list[str]:
        """Returns the actions there are."""
        return ["search[words]"] if self.words is None else [f"click[{each}]" for each in self.clickable()]

    def shown(self) -> list[Product]:
        """Returns the products of this page of results."""
        return self.results[(self.page - 1) * PER_PAGE : self.page * PER_PAGE]

    def render(self) -> str:
        """Returns the page as text."""
        chosen = "".join(f"You have clicked {value}.\n" for value in self.options.values())
        text = chosen * (self.product is not None) + self.style.separator.join(self._parts())
        return f"{text}\nAvailable actions: {', '.join(self.actions())}" if self.style.list_actions else text

    def key(self) -> str:
        """Returns the identity of the state: pages that look the same and lead to the same."""
        asin = self.product.asin if self.product else ""
        return f"{self.words}|{self.page}|{asin}|{sorted(self.options.items())}|{self.text}|{self.bought}"

    def _click(self, meant: str) -> None:
        if meant == BACK:
            self._leave()
            self.words, self.results = None, []
        elif meant == BUY:
            self.bought = True
        elif self.product is None:
            self.page += (meant == NEXT) - (meant == PREVIOUS)
            self.product = None if meant in (NEXT, PREVIOUS) else self.catalogue.by_asin[meant]
        elif meant == PREVIOUS:
            if self.text:
                self.text = ""
            else:
                self._leave()
        elif meant in self._texts():
            self.text = meant
        else:
            name = next(name for name, values in self.product.options.items() if meant in values)
            self.options[name] = meant

    def _leave(self) -> None:
        self.product, self.text, self.options = None, "", {}

    def _texts(self) -> tuple[str, ...]:
        return (*TEXTS, ATTRIBUTES) if self.style.show_attributes else TEXTS

    def _parts(self) -> list[str]:
        wish = ["Instruction:", self.instruction]
        if self.words is None:
            return ["WebShop", *wish, "Search"]
        buttons = [each for each in self.clickable() if each in (BACK, PREVIOUS, NEXT)]
        parts = wish * self.style.repeat_instruction
        if self.product is None:
            items = [part for each in self.shown() for part in (each.asin, each.name, each.price_tag)]
            total = f"Page {self.page} (Total results: {len(self.results)})"
            return [*parts, BACK, total, *buttons[1:], *items]
        if self.text:
            return [*parts, *buttons, *self._reading(self.product)]
        options = [part for name, values in self.product.options.items() for part in (name, *values)]
        facts = [self.product.name, f"Price: {self.product.price_tag}", f"Rating: {self.product.rating}"]
        return [*parts, *buttons, *options, *facts, *self._texts(), BUY]

    def _reading(self, product: Product) -> list[str]:
        """Returns the parts of an item's text; reviews are in none of the published files."""
        if self.text == "Description":
            return [product.description[: self.style.longest_text] or "No Description"]
        if self.text == "Features":
            return ["\n".join(product.features)[: self.style.longest_text] or "No Features"]
        if self.text == ATTRIBUTES:
            return [*product.attributes, product.category, product.query, product.product_category]
        return ["No reviews found"]
