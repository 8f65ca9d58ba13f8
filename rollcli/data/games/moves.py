"""Moves on a grid, and how they are found in what a model writes."""

from __future__ import annotations

import re

MOVES = {"L": "left", "D": "down", "R": "right", "U": "up"}
"""Letter → word; the order is gymnasium's numbering of FrozenLake's actions."""

_WORDS = {**{word: letter for letter, word in MOVES.items()}, "←": "L", "↓": "D", "→": "R", "↑": "U"}
_WORD = re.compile(r"\b(left|down|right|up)\b|[←↓→↑]", re.IGNORECASE)
_LETTERS = re.compile(r"[LDRUldru](?:[\s,;|]*[LDRUldru])*")
_MARKED = (
    re.compile(r"<(?:answer|action)>(.*?)(?:</(?:answer|action)>|$)", re.IGNORECASE | re.DOTALL),
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"\b(?:actions?|moves?|answer)\s*[:=]\s*([^\n]*)", re.IGNORECASE),
)


def marked(response: str) -> tuple[str, bool]:
    """Returns the part of a response that holds the action, and whether the model marked it as such.

    What stands after the last `</think>` counts, and in it the last `<answer>…</answer>` or `<action>…</action>`,
    `\\boxed{…}`, or `Action: …`.
    """
    spoken = response.rpartition("</think>")[2]
    for pattern in _MARKED:
        if found := pattern.findall(spoken):
            return found[-1], True
    return spoken, False


def parse_moves(response: str, most: int = 1) -> str:
    """Returns the moves of a response as letters, at most `most`; empty when it holds none.

    Letters alone (`R`, `rrd`, `R, R, D`), words, and arrows are understood. In prose without a marked action, which may
    weigh several moves, the last word is the move.

    >>> parse_moves("Left is a hole, so I go right.")
    'R'
    >>> parse_moves("<answer>down || down</answer>", most=3)
    'DD'
    """
    text, is_marked = marked(response)
    bare = text.strip().strip(".!`'\"*[]()")
    if _LETTERS.fullmatch(bare):
        return "".join(letter for letter in bare.upper() if letter in MOVES)[:most]
    found = "".join(_WORDS[match.group().lower()] for match in _WORD.finditer(text))
    is_list = is_marked or not _WORD.sub("", text).strip(" \n\t,;|.")
    return found[:most] if is_list else found[-1:]
