"""Plug-ins of every shape, strict types, and checks that span fields, on a recipe's way from values to classes."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from rollcli.config.build import BAD, Builder, build_recipe, dotted, keys
from rollcli.config.dump import to_values
from rollcli.config.load import load_recipe, rebuild
from rollcli.errors import ConfigError

PLUGINS = """
from __future__ import annotations
from dataclasses import dataclass, field

@dataclass
class Shop:
    items: int = 3
    prices: list[float] = field(default_factory=list)

    def problems(self):
        if self.items < 1:
            yield "items", "must be at least 1"

class Maze:
    def __init__(self, width, height=5):
        if width < 2:
            raise ValueError(f"a maze of width {width} has no way")
        self.width, self.height = width, height

def make(size=1, **rest):
    made = Maze(2)
    made.width = size
    made.rest = rest
    return made

def number():
    return 7

@dataclass(frozen=True)
class Frozen:
    a: int = 1

constant = 3
"""


@pytest.fixture
def environment(recipe, tmp_path):
    """Builds a recipe whose task plays in the given environment, from a plug-in file beside the recipe."""
    (tmp_path / "mine.py").write_text(PLUGINS)

    def build(block):
        return load_recipe(recipe(), [f"tasks[0].environment={block}"])

    return build


def refused(environment, block):
    with pytest.raises(ConfigError) as caught:
        environment(block)
    return [str(problem).removeprefix("command line, override 1: ") for problem in caught.value.problems]


def test_a_dataclass_from_a_file(environment):
    shop = environment("{name: './mine.py:Shop', items: 5, prices: [1, 2.5]}").recipe.tasks[0].environment
    assert (type(shop).__name__, shop.items, shop.prices, shop.name) == ("Shop", 5, [1.0, 2.5], "./mine.py:Shop")


def test_a_class_from_a_file(environment):
    maze = environment("{name: './mine.py:Maze', width: 4}").recipe.tasks[0].environment
    assert (maze.width, maze.height) == (4, 5)


def test_a_function_from_a_file(environment):
    made = environment("{name: './mine.py:make', size: 9, any: thing}").recipe.tasks[0].environment
    assert (made.width, made.rest) == (9, {"any": "thing"})


@pytest.mark.parametrize(
    "block",
    [
        "{name: './mine.py:Shop', items: 5}",
        "{name: './mine.py:Maze', width: 4}",
        "{name: './mine.py:make', size: 9, any: thing}",
    ],
)
def test_a_plug_in_of_any_shape_is_written_down_and_rebuilt_elsewhere(environment, block, tmp_path, monkeypatch):
    loaded = environment(block)
    values = to_values(loaded.recipe, loaded.folder)
    assert values["tasks"][0]["environment"]["name"].startswith(str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = rebuild(values).tasks[0].environment
    first = loaded.recipe.tasks[0].environment
    assert type(again) is type(first)
    assert {k: v for k, v in vars(again).items() if k != "name"} == {
        k: v for k, v in vars(first).items() if k != "name"
    }


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{name: './mine.py:Shop', itmes: 5}", "unknown key `tasks[0].environment.itmes` (did you mean `items`?)"),
        ("{name: './mine.py:Shop', items: 0}", "`tasks[0].environment.items`: must be at least 1"),
        ("{name: './mine.py:Shop', prices: 3}", "`tasks[0].environment.prices`: expected a list, found `3`"),
        ("{name: './mine.py:Maze', widht: 5}", "unknown key `tasks[0].environment.widht` (did you mean `width`?)"),
        ("./mine.py:Maze", "`tasks[0].environment`: needs the option `width`"),
        ("{name: './mine.py:Maze', width: 1}", "`tasks[0].environment`: a maze of width 1 has no way"),
        (
            "./mine.py:number",
            "`tasks[0].environment`: `./mine.py:number` gives 7, which cannot be given a `name`",
        ),
        (
            "./mine.py:Frozen",
            "`tasks[0].environment`: `./mine.py:Frozen` gives Frozen(a=1), which cannot be given a `name`",
        ),
        ("./mine.py:constant", "`tasks[0].environment`: `./mine.py:constant` is neither a class nor a function"),
        ("[a]", "`tasks[0].environment`: expected a name, or a block with `name`, found a list of 1"),
        ("{name: 3}", "`tasks[0].environment`: expected a name, or a block with `name`, found a block of keys"),
        ("null", "`tasks[0].environment`: is required"),
    ],
)
def test_a_plug_in_block_that_is_wrong(environment, block, message):
    assert refused(environment, block) == [message]


@pytest.mark.parametrize(
    ("block", "start"),
    [
        ("./gone.py:Shop", "`tasks[0].environment`: plug-in file `gone.py` not found; tried "),
        ("./mine.py:Shpo", "`tasks[0].environment`: `./mine.py` has no `Shpo` (did you mean `Shop`?); "),
        (
            "./broken.py:A",
            "`tasks[0].environment`: environment `./broken.py:A` does not import: No module",
        ),
        ("{name: './bad.py:A'}", "`tasks[0].environment.name`: environment `./bad.py:A` does not import: SyntaxError"),
    ],
)
def test_a_plug_in_that_cannot_be_imported(environment, tmp_path, block, start):
    (tmp_path / "broken.py").write_text("import gone\n")
    (tmp_path / "bad.py").write_text("def (\n")
    (line,) = refused(environment, block)
    assert line.startswith(start)


@dataclass
class Inner:
    a: int = 1


@dataclass
class Example:
    number: float = 1.0
    count: int | None = None
    either: str | dict[str, str] = "auto"
    items: list[Inner] = field(default_factory=list)
    free: dict[str, Any] = field(default_factory=lambda: {"kept": 1})
    mode: Literal["on", "off"] = "on"
    inner: Inner = field(default_factory=Inner)


def build(values):
    builder = Builder({})
    return builder.dataclass(Example, values, ()), [str(problem) for problem in builder.found]


def test_an_integer_may_stand_for_a_float_and_nothing_else_changes_type():
    made, found = build({"number": 2, "count": None, "either": {"a": "b"}, "items": [{"a": 3}], "free": {"x": [1]}})
    assert not found
    assert type(made.number) is float
    assert made == Example(2.0, None, {"a": "b"}, [Inner(3)], {"kept": 1, "x": [1]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"number": "2"}, "`number`: expected a number, found `2`"),
        ({"number": True}, "`number`: expected a number, found `true`"),
        ({"count": True}, "`count`: expected a whole number, found `true`"),
        ({"count": 1.0}, "`count`: expected a whole number, found `1.0`"),
        ({"either": None}, "`either`: expected text or a block of keys, found nothing (null)"),
        ({"either": {"a": 1}}, '`either.a`: expected text, found `1` (put it in quotes: "…")'),
        ({"items": {"a": 1}}, "`items`: expected a list, found a block of keys"),
        ({"items": [{"a": 1}, 5]}, "`items[1]`: expected a block of keys, found `5`"),
        ({"items": [{"b": 1}]}, "unknown key `items[0].b`; known: a"),
        ({"mode": True}, "`mode`: expected one of `on`, `off`, found `true`"),
        ({"mode": "onn"}, "`mode`: expected one of `on`, `off`, found `onn` (did you mean `on`?)"),
        ({"free": []}, "`free`: expected a block of keys, found a list of 0"),
        ({"inner": None}, "`inner`: expected a block of keys, found nothing (null)"),
        ({"count": "None"}, "`count`: expected a whole number, found `None` (write `null` for no value)"),
    ],
)
def test_strictness(values, message):
    assert build(values)[1] == [message]


def test_a_failed_value_falls_back_to_its_default_so_that_the_rest_is_checked():
    made, found = build({"number": "x", "count": "y"})
    assert made == Example() and len(found) == 2


@pytest.mark.parametrize(
    ("block", "coefficient", "estimator"),
    [
        ("grpo", 0.04, "k3"),
        ("{name: grpo, kl: {estimator: k1}}", 0.04, "k1"),
        ("{name: grpo, kl: {coefficient: 0}}", 0.0, "k3"),
        ("{name: dapo, kl: {target: null}}", 0.0, "k3"),
        ("{name: rloo, kl: {coefficient: 0.5}}", 0.5, "k1"),
    ],
)
def test_a_nested_block_keeps_the_defaults_of_the_class_around_it(recipe, block, coefficient, estimator):
    kl = load_recipe(recipe(), [f"algorithm={block}"]).recipe.algorithm.kl
    assert (kl.coefficient, kl.estimator) == (coefficient, estimator)


def test_nested_blocks_of_two_depths_keep_their_defaults(recipe):
    made = load_recipe(recipe(), ["critic.optimizer.weight_decay=0.1", "algorithm={name: dapo, shaping: {std: batch}}"])
    assert made.recipe.critic.optimizer.learning_rate == 1e-5
    assert (made.recipe.algorithm.shaping.overlong_buffer, made.recipe.algorithm.shaping.std) == (0.2, "batch")
    assert rebuild(made.values) == made.recipe


def test_a_problem_of_a_nested_block_is_told_at_its_key(recipe):
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe(more="algorithm:\n  name: grpo\n  kl:\n    coefficient: -1\n"))
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (11, 5)
    assert problem.message == "`algorithm.kl.coefficient`: must not be negative, is -1.0"


def test_what_is_already_known_to_be_wrong_is_not_told_again():
    made, found = build({"number": BAD, "items": [BAD], "free": {"a": BAD}, "inner": BAD})
    assert made == Example() and found == []


def test_paths_as_they_are_written():
    assert dotted(("tasks", 0, "source", "name")) == "tasks[0].source.name"
    assert keys("tasks.0.name") == ("tasks", 0, "name")


def test_problems_come_in_order_of_place_overrides_last(recipe):
    name = recipe(more="seed: x\nminibatches: x\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, ["policy.workers=x", "group_size=x"])
    assert [(p.source, p.line) for p in caught.value.problems] == [
        ("r.yaml", 8), ("r.yaml", 9), ("command line", 1), ("command line", 2),
    ]  # fmt: skip


def test_a_recipe_needs_no_places():
    with pytest.raises(ConfigError, match="`steps`: is required"):
        build_recipe({"model": {"path": "m"}, "tasks": []}, {})


def hint_of(values):
    with pytest.raises(ConfigError) as raised:
        build_recipe(values, {})
    return raised.value.hint


def test_the_hint_names_the_key_of_the_first_problem():
    tasks = [{"name": "a", "source": "sums", "rewards": [{"name": "math"}]}]
    good = {"model": {"path": "x"}, "tasks": tasks, "steps": 1}
    told = "run `roll config explain {}` to see what it means"
    assert hint_of({**good, "steps": "many"}) == told.format("steps")
    assert hint_of({**good, "group_sise": 8}) == told.format("group_size")
    assert hint_of({**good, "rollout": {"samplig": 1}}) == told.format("rollout.sampling")
    assert hint_of({**good, "rollout": {"zzzzzz": 1}}) == told.format("rollout")
    task = {"name": "a", "source": {"name": "sums", "prompt": 3}}
    assert hint_of({**good, "tasks": [task]}) == told.format("tasks.source.prompt")
    assert hint_of({**good, "zzzzzz": 8}) == "run `roll config explain` to see all keys"
