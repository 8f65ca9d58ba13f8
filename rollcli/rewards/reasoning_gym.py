"""Scores answers to problems of the `reasoning-gym` package by each data set's own `score_answer`.

A few of its scorers evaluate an answer as Python. What those are given is screened first: no answer is evaluated that
could call anything but a mathematical function.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollcli.data.sources.reasoning_gym import create
from rollcli.rewards.answers import stated_answer
from rollcli.rewards.base import RewardResult

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Data sets whose scorers call `eval` on an answer, hoping for a list."""
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Data sets whose scorers have sympy parse an answer, which evaluates it."""

_FORMULA = re.compile(r"[A-Za-z0-9\s+\-*/^().,]{0,1000}")
_WORD = re.compile(r"[A-Za-z]{2,}")
_FUNCTIONS = frozenset(
    "Abs acos acosh asin asinh atan atanh cos cosh cot csc erf exp ln log pi sec sign sin sinh sqrt tan tanh".split()
)
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z]")
_TOWER = re.compile(r"(?:\*\*|\^)[\s\d().\-]*(?:\*\*|\^)|(?:\*\*|\^)[\s(\-]*\d{4}")
"""A power of a power, or one of a thousand and more: numbers that fill the memory."""


def reasoning_gym(
    response: str, dataset: str, entry: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> RewardResult:
    r"""Returns the data set's own score of a response's answer.

    Args:
        response: the answer stands in its last `<answer>…</answer>` or `\boxed{…}`, as `rewards.answers` finds it; or
            is all that follows the thinking.
        dataset: name of the data set; with `entry` and `options` a column of the source `reasoning_gym`.
        entry: the package's item.
        options: the data set's options.

    Returns:
        score, from 0 to 1: many data sets give a small one for an answer of the right form; accuracy, 1 for a full
        score; metric `refused`, 1 for an answer that would be evaluated and must not be.

    Raises:
        DatasetNotFound: the package has no such data set, or it does not take these options.
    """
    spoken = response.rpartition("</think>")[2].strip()
    stated = stated_answer(spoken)
    answer = spoken if stated is None else stated
    source = entry.get("metadata", {}).get("source_dataset", dataset)
    if not is_harmless(source, answer):
        return RewardResult(0.0, {"refused": 1.0}, 0.0)
    scorer = _scorer(dataset, json.dumps(options or {}, sort_keys=True))
    try:
        score = float(scorer(answer, entry))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        score = 0.0  # what a scorer stumbles over is no answer
    return RewardResult(score, {"refused": 0.0}, float(score >= 0.999))


def is_harmless(dataset: str, answer: str) -> bool:
    """Returns whether an answer may be given to a data set's scorer."""
    if dataset in LITERALS and "(" in answer:
        try:
            ast.literal_eval(answer.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return False
    if dataset in FORMULAS:
        return bool(
            _FORMULA.fullmatch(answer)
            and _FUNCTIONS.issuperset(_WORD.findall(answer))
            and not _ATTRIBUTE.search(answer)
            and not _TOWER.search(answer)
        )
    return True


@lru_cache(maxsize=64)
def _scorer(name: str, options: str) -> Any:
    return create(name, json.loads(options)).score_answer
