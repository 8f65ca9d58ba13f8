"""IFEval's instructions on form: placeholders, lists, sections, titles, JSON, repeated prompts. Linear in the text."""

from __future__ import annotations

import json
import re

_EMPHASIZED = re.compile(r"\*[^\n*]*\*")
_STRONG = re.compile(r"\*\*[^\n*]*\*\*")
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """`detectable_content:number_placeholders`: at least so many `[…]`, each within one line."""
    return sum(_brackets(line) for line in text.split("\n")) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """`detectable_content:postscript`: the marker stands somewhere, in either case; `P.S.` may be spaced `P. S.`."""
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(re.search(patterns.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower()))


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """`detectable_format:number_bullet_lists`: exactly so many lines that open with `* ` or `-`."""
    lines = [line.lstrip() for line in text.split("\n")]
    stars = sum(line.startswith("*") and not line.startswith("**") for line in lines)
    return stars + sum(line.startswith("-") for line in lines) == num_bullets


def constrained_response(text: str) -> bool:
    """`detectable_format:constrained_response`: holds one of the three answers that were allowed."""
    return any(option in text for option in _OPTIONS)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """`detectable_format:number_highlighted_sections`: at least so many `*…*`, where `**…**` counts once more."""
    marked = [*_EMPHASIZED.findall(text), *_STRONG.findall(text)]
    return sum(bool(each.strip("*").strip()) for each in marked) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """`detectable_format:multiple_sections`: at least so many headings, the word and a number."""
    return len(re.findall(re.escape(section_spliter.strip()) + r"\s?[0-9]+", text)) >= num_sections


def json_format(text: str) -> bool:
    """`detectable_format:json_format`: all of it is JSON, alone or in one code block."""
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):  # what nests too deep to be read is no answer either
        return False
    return True


def title(text: str) -> bool:
    """`detectable_format:title`: a line has a `<<title>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(text: str) -> bool:
    """`combination:two_responses`: two different answers with `******` between them."""
    parts = [part.strip() for part in text.split("******")]
    full = [part for part in parts if part]
    return all(parts[1:-1]) and len(full) == 2 and full[0] != full[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """`combination:repeat_prompt`: opens with the request, word for word."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _brackets(line: str) -> int:
    """Counts `[…]` in one line; a regular expression takes quadratic time over a million `[`."""
    count = position = 0
    while True:
        opening = line.find("[", position)
        closing = line.find("]", opening + 1)
        if opening < 0 or closing < 0:
            return count
        count, position = count + 1, closing + 1
