"""Goals of WebShop: a wish for a product, and where its shop is."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rollcli.config.schema import Problems, in_unit_interval, positive
from rollcli.data.carriers import Message
from rollcli.data.sources.base import Problem, Split, unit_hash
from rollcli.data.webshop.catalogue import Catalogue, Files, find_files, load
from rollcli.data.webshop.goals import Goal, SyntheticGoals, as_the_original, human_goals
from rollcli.data.webshop.pages import BUY, PageStyle, Visit
from rollcli.data.webshop.shopper import next_action
from rollcli.errors import DatasetNotFound
from rollcli.runs.locations import local_data


@dataclass
class WebShopSource:
    """Goals over a folder of WebShop's files, in the original's formats (data/webshop/).

    Goals that people wrote (`items_human_ins.json`) are divided as in the original, by their number after its shuffle.
    Synthetic ones have many combinations of options for one wish, which by number would be in both splits: they, and
    whatever `held_out: product` says, are divided by a hash of their product.
    """

    path: str
    """Folder with the files; in a cluster, every machine has it there."""
    prompt: str = (
        "You are shopping on WebShop for what the instruction says. Each turn you see a page and its available "
        "actions. Search with search[words]; open a product, choose the values of its options, turn pages and read "
        "with click[value]; and end with click[Buy Now] once the product and its chosen options fit. Think briefly, "
        "then write one action as <action>click[value]</action>.\n\n{state}"
    )
    """The opening message; `{state}` is the first page, which tells the instruction."""
    products_file: str | None = None
    """Product file in the folder; null takes `items_shuffle.json`, `items_shuffle_1000.json` or `products*.json`."""
    attributes_file: str | None = None
    """File of attributes and wishes; null takes `items_ins_v2.json` or `items_ins_v2_1000.json`, or does without."""
    human_file: str | None = None
    """File of goals that people wrote; null takes `items_human_ins.json`, or does without."""
    max_products: int | None = None
    """Products read from the beginning of the file; null reads all, of which a million take some 10 GiB a process."""
    goals: Literal["auto", "human", "synthetic"] = "auto"
    """Which goals; `auto` takes those that people wrote where there is a file of them."""
    goals_per_product: int | None = None
    """Most synthetic goals of one product, at equal distances among its combinations of options; null takes all."""
    held_out: Literal["auto", "original", "product"] = "auto"
    """How the test split is chosen; `auto` is `original` for goals that people wrote, else `product`."""
    held_out_share: float = 0.1
    """Share of the products whose goals are held out; the original's split does not ask."""
    price_seed: int = 0
    """Seed of price limits, and of prices that are a range: the same goals in every run that does not change it."""
    separator: str = " [SEP] "
    """What stands between the parts of a page."""
    show_attributes: bool = False
    """Whether an item has a page that tells its attributes."""
    repeat_instruction: bool = False
    """Whether every page begins with the instruction, as in the original; the chat has it in its first message."""
    list_actions: bool = True
    """Whether a page ends with the list of its actions."""
    longest_text: int = 2000
    """Characters of a description, or of a list of features, that are shown."""
    demonstrate: bool = False
    """Each problem is a turn of a scripted shopper, with the turns before it as its chat, for supervised learning."""
    expert_share: float = 0.8
    """Share of demonstrated turns that the shopper takes; the rest are random clicks, from which it finds its way."""
    demonstrated_turns: int = 20
    """Most turns of a demonstrated visit."""
    demonstrated_answer: str = "<action>{action}</action>"
    """How a demonstrated turn is written; `{action}` is its action."""

    def problems(self) -> Problems:
        if not 0 < self.held_out_share < 1:
            yield "held_out_share", f"must be between 0 and 1, is {self.held_out_share}"
        yield from in_unit_interval(self, "expert_share")
        yield from positive(self, "max_products", "goals_per_product", "longest_text", "demonstrated_turns")
        for name, mark in (("prompt", "{state}"), ("demonstrated_answer", "{action}")):
            if mark not in getattr(self, name):
                yield name, f"must say where it belongs: write `{mark}`"
        if self.goals == "synthetic" and self.held_out == "original":
            yield "held_out", "must be `product` for synthetic goals: a wish would be in both splits"

    def open(self, split: Split, seed: int) -> WebShopItems:
        """Returns the goals of a split.

        Raises:
            DatasetNotFound: the folder or a file is not there or broken, or the split has no goal.
        """
        named = {role: getattr(self, f"{role}_file") for role in ("products", "attributes", "human")}
        files = find_files(local_data(self.path).resolve(), self.max_products, **named)
        catalogue = load(files)
        goals = self._goals(catalogue, files, split)
        if not goals:
            raise DatasetNotFound(
                f"no goal of `{self.path}` belongs to the {split} split",
                hint="the original's split begins to train at goal 1500: try `held_out: product`, or more products",
            )
        return WebShopItems(self, catalogue, files, goals, split, seed)

    def style(self) -> PageStyle:
        """Returns how pages look."""
        return PageStyle(
            self.separator, self.show_attributes, self.repeat_instruction, self.list_actions, self.longest_text
        )

    def _goals(self, catalogue: Catalogue, files: Files, split: Split) -> Sequence[Goal]:
        if self.goals == "human" and files.human is None:
            raise DatasetNotFound(
                f"`goals: human` needs `items_human_ins.json` in `{self.path}`", hint="or name it with `human_file`"
            )
        human = self.goals != "synthetic" and files.human is not None
        products = catalogue.by_asin
        if human and self.held_out != "product":
            return as_the_original(human_goals(products, files.human, self.price_seed), split)
        held = {asin: unit_hash(asin) < self.held_out_share for asin in products}
        own = {asin: each for asin, each in products.items() if held[asin] == (split == "test")}
        if human:
            return human_goals(own, files.human, self.price_seed)
        return SyntheticGoals(list(own.values()), self.price_seed, self.goals_per_product)


class WebShopItems:
    """Goals as problems; demonstrated turns never end, and are each a pure function of (options, split, seed, n)."""

    def __init__(
        self, source: WebShopSource, catalogue: Catalogue, files: Files, goals: Sequence[Goal], split: Split, seed: int
    ) -> None:
        self.source = source
        self.catalogue = catalogue
        self.goals = goals
        self.split = split
        self.seed = seed
        self.shop = {name: value and str(value) for name, value in asdict(files).items()} | {"most": files.most}
        picked = sorted({0, len(goals) // 2, len(goals) - 1})
        content = [asdict(source) | {"path": ""}, len(goals), [goals[place].as_payload() for place in picked]]
        self.fingerprint = "webshop:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def size(self) -> int | None:
        """Number of goals; None for demonstrated turns."""
        return None if self.source.demonstrate else len(self.goals)

    def __getitem__(self, index: int) -> Problem:
        """Returns a goal, or a turn of a demonstrated visit for one.

        Raises:
            PluginError: a demonstration needs the search, whose library is not installed.
        """
        rng = random.Random(f"{self.seed}/{self.split}/{index}")
        goal = self.goals[rng.randrange(len(self.goals)) if self.source.demonstrate else index]
        visit = Visit(self.catalogue, goal.instruction, self.source.style())
        opening = self.source.prompt.replace("{state}", visit.render())
        payload = {
            "success": 0.0,
            "goal": goal.as_payload(),
            "shop": self.shop,
            "style": asdict(visit.style),
            "price_seed": self.source.price_seed,
        }
        if not self.source.demonstrate:
            return Problem([{"role": "user", "content": opening}], payload)
        turns = self._play(goal, visit, rng)
        turn = rng.randrange(len(turns))
        chat: list[Message] = []
        for number, (seen, said) in enumerate(turns[: turn + 1]):
            chat += [{"role": "user", "content": seen if number else opening}, {"role": "assistant", "content": said}]
        return Problem(chat[:-1], {**payload, "response": turns[turn][1]})

    def _play(self, goal: Goal, visit: Visit, rng: random.Random) -> list[tuple[str, str]]:
        """Returns the turns of a visit: what is seen, and what is said."""
        turns = []
        while not visit.bought and len(turns) < self.source.demonstrated_turns:
            kind, words = next_action(goal, visit)
            others: list[Any] = [each for each in visit.clickable() if each != BUY]
            if others and rng.random() >= self.source.expert_share:
                kind, words = "click", rng.choice(others)
            said = self.source.demonstrated_answer.replace("{action}", f"{kind}[{words}]")
            turns.append((visit.render(), said))
            visit.act(kind, words)
        return turns
