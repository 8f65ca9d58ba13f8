import pytest

from rollcli.config.locate import Place, located, places
from rollcli.errors import ConfigError, PlanError


def refused(text):
    with pytest.raises(ConfigError) as caught:
        places(text, "r.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_every_key_and_item_has_a_place():
    found = places("a: 1\nb:\n  c: [x, yy]\n  d:\n  - e: 2\n", "r.yaml")
    spots = {path: (place.line, place.column, place.length) for path, place in found.items()}
    assert spots == {
        (): (1, 1, 1),
        ("a",): (1, 1, 1),
        ("b",): (2, 1, 1),
        ("b", "c"): (3, 3, 1),
        ("b", "c", 0): (3, 7, 1),
        ("b", "c", 1): (3, 10, 2),
        ("b", "d"): (4, 3, 1),
        ("b", "d", 0): (5, 5, 4),
        ("b", "d", 0, "e"): (5, 5, 1),
    }
    assert found[("b", "c")] == Place("r.yaml", 3, 3, "  c: [x, yy]", 1)


def test_an_empty_text_has_no_keys():
    assert list(places("", "r.yaml")) == list(places("# nothing\n", "r.yaml")) == [()]


def test_an_empty_last_item_has_a_place():
    assert places("a:\n  -", "r.yaml")[("a", 0)].line == 2


def test_a_key_that_spans_lines_is_marked_to_the_end_of_its_first():
    assert places('? "a\n  b"\n: 1\n', "r.yaml")[("a b",)].length == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", "r.yaml:2:2: not valid YAML: expected ',' or ']', but got ':'"),
        ("a:\n\tb: 1\n", "r.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: 1\nb: x\x0by\n", "r.yaml:2:5: not valid YAML: character #x000b is not allowed"),
        ("a: 'b\n", "r.yaml:2:1: not valid YAML: found unexpected end of stream"),
        ("a: 1\n---\nb: 1\n", "r.yaml:2:1: not valid YAML: but found another document"),
        ("- a\n", "r.yaml:1:1: a recipe is a mapping of keys to values"),
        ("hello\n", "r.yaml:1:1: a recipe is a mapping of keys to values"),
        ("a: 1\n2: x\n", "r.yaml:2:1: a key is text; put it in quotes"),
        ("yes: x\n", "r.yaml:1:1: a key is text; put it in quotes"),
        ("a: &x\n  b: *x\n", "r.yaml:2:3: an alias stands inside its own anchor"),
    ],
)
def test_what_is_no_recipe_is_refused_at_its_place(text, message):
    assert refused(text) == [message]


def test_every_key_that_stands_twice_is_named():
    assert refused("a: 1\nb: {c: 1, c: 2}\na: 2\n") == [
        "r.yaml:2:11: key `c` stands here a second time",
        "r.yaml:3:1: key `a` stands here a second time",
    ]


def test_the_same_block_twice_by_an_alias():
    found = places("a: &x {c: 1}\nb: *x\n", "r.yaml")
    assert found[("b", "c")].line == 1


def test_snippet_of_a_problem_is_its_line():
    with pytest.raises(ConfigError) as caught:
        places("a: 1\nb: 2\nc: ]x\n", "r.yaml")
    (problem,) = caught.value.problems
    assert problem.snippet == "c: ]x" and problem.line == 3


def test_an_error_is_located_at_its_key_or_the_nearest_above():
    places = {("placement",): Place("r.yaml", 3, 1, "", 1), ("placement", "policy"): Place("r.yaml", 4, 3, "", 1)}
    error = PlanError("`placement.policy`: wrong", "hint")
    assert str(located(error, places)) == "r.yaml:4:3: `placement.policy`: wrong"
    assert located(error, places).hint == "hint"
    assert str(located(PlanError("`placement.rollout`: wrong"), places)).startswith("r.yaml:3:1: ")
    places["tasks", 0, "rewards", 1] = Place("r.yaml", 9, 7, "", 1)
    inside = PlanError("`tasks[0].rewards[1].args.gold`: wrong")
    assert str(located(inside, places)).startswith("r.yaml:9:7: ")
    for elsewhere in (PlanError("`steps`: wrong"), PlanError("unknown accelerator `H10`")):
        assert located(elsewhere, places) is elsewhere
