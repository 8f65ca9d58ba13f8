"""Scores the form of a response: thoughts first, then the answer, each between its marks (arXiv 2501.12948)."""

from __future__ import annotations

_MARKS = ("<think>", "</think>", "<answer>", "</answer>")


def format(response: str) -> float:
    """Scores a response 1 when it is `<think>…</think><answer>…</answer>`, else 0.

    Each mark stands once and in this order, nothing but white space stands before, between and after the two parts,
    and neither part is empty. Takes time linear in the response.
    """
    text = response.strip()
    if any(text.count(mark) != 1 for mark in _MARKS) or not text.startswith("<think>"):
        return 0.0
    thoughts, closed, rest = text.removeprefix("<think>").partition("</think>")
    answer, ended, after = rest.strip().removeprefix("<answer>").partition("</answer>")
    whole = closed and ended and not after and rest.lstrip().startswith("<answer>")
    return float(bool(whole and thoughts.strip() and answer.strip()))
