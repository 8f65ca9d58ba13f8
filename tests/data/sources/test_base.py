"""Templates of prompts are checked against the columns there are."""

import pytest

from rollcli.data.sources.base import Problem, check_template
from rollcli.errors import DatasetNotFound


def test_known_columns_pass() -> None:
    check_template("Q: {question} {{literal}} {answer!s:>3}", {"question": 1, "answer": 2}, "prompt")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{qestion}", "`prompt` asks for column `qestion`, which the data does not have .did you mean `question`?"),
        ("{zzz}", "asks for column `zzz`, which the data does not have$"),
        (r"{question} \boxed{}", "asks for column ``"),
        ("{question.__class__}", "asks for column `question.__class__`"),
        ("{question", "`prompt` is not a template"),
        ("question}", "`prompt` is not a template"),
    ],
)
def test_anything_else_is_explained(template: str, message: str) -> None:
    with pytest.raises(DatasetNotFound, match=message) as caught:
        check_template(template, {"question": 1, "answer": 2}, "prompt")
    assert caught.value.hint


def test_payloads_are_not_shared() -> None:
    assert Problem([]).payload is not Problem([]).payload
