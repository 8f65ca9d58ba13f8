r"""Scores a mathematical answer against the gold one: 1 when they are equal, else 0.

The answer is looked for in this order, and the first kind that is there decides:

1. the last complete `\boxed{…}`;
2. what follows the last `#### ` (a Markdown heading of that depth does not count);
3. what follows the last "answer is" or "Answer:", up to the end of the sentence, when it holds a number or LaTeX;
4. the last line, and nothing above it: its last number, or its LaTeX as `math-verify` reads it. A right number that is
   only passed on the way to another answer, or to the end of the budget, is no answer.

Two plain numbers (integers, decimals, fractions, with or without currency, per cent and thousands separators) are
compared as exact fractions, in microseconds; everything else goes to `math-verify`, at about 10 ms. That one has no
time limit of its own here: its limit is a signal, which neither threads nor actors may use, so callers bring theirs
(`rollcli.rewards.isolation`). What would obviously run into it, such as `9**9**9**9`, counts as no answer.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rollcli.errors import RewardError
from rollcli.rewards.base import RewardResult

MAX_ANSWER_CHARS = 512
MAX_DIGITS = 100
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 1_000
MAX_NESTING = 24
TAIL_CHARS = 2_000

_BOX_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
# A heading such as `#### Step 4` opens with a word; an answer opens with a number, a sign, LaTeX or one letter.
_HASHES = re.compile(r"####\s*((?:[^A-Za-z\s#]|[A-Za-z](?![a-z])).*|$)", re.MULTILINE)
_ANSWER_IS = re.compile(r"\banswer\s*(?:is|:|=)[\s:*]*", re.IGNORECASE)
_LATEX = re.compile(r"(?<!\\)\$[^$]+\$|\\\(.+\\\)|\\\[.+\\\]")
_UNFINISHED = re.compile(r"\s*[-+*/^=×÷(]\s*$")
_SENTENCE_END = re.compile(r"[.;](?:\s|$)")
_MATHS = re.compile(r"[0-9\\$]")

_INTEGER = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+"
_NUMBER = rf"(?:(?:{_INTEGER})(?:\.[0-9]*)?|\.[0-9]+)"
_PLAIN = re.compile(
    rf"(?P<sign>[-+]?)\s*[$€£]?\s*(?:(?P<top>{_NUMBER})(?:\s*/\s*(?P<bottom>{_NUMBER}))?"
    rf"|(?P<spaced>[1-9][0-9]{{0,2}}(?:[ ][0-9]{{3}})+)"
    rf"|\\[dt]?frac\s*(?:\{{\s*(?P<top2>{_NUMBER})\s*\}}|(?P<top3>[0-9]))"
    rf"\s*(?:\{{\s*(?P<bottom2>{_NUMBER})\s*\}}|(?P<bottom3>[0-9])))\s*(?P<percent>%?)"
)

_POWERS = re.compile(r"[0-9]+(?:[\s)}]*(?:\^|\*\*)[\s{(]*-?[0-9]+)+")
_FACTORIAL = re.compile(r"([0-9]*)[\s)}]*(?<!\\)!")
_DUNDER = re.compile(r"__\w+__")
_WORD = re.compile(r"(?<![A-Za-z])(?!(?:and|sin|cos|tan|cot|sec|csc|log|exp|sqrt|arcsin|arccos|arctan)\b)[A-Za-z]{3,}")


def math(response: str, answer: str) -> RewardResult:
    r"""Scores a response 1 when its answer equals the gold one, else 0.

    Args:
        response: decoded text, any text at all.
        answer: plain (`72`, `\frac{1}{2}`), a GSM8K solution that ends `#### 72`, or a solution with `\boxed{}`.

    Returns:
        score and accuracy, 0 or 1, and the metric `unparsable`, 1 when no answer could be read.

    Raises:
        RewardError: the gold answer itself cannot be read.
    """
    gold = _gold(answer)
    found = extract_answer(response)
    marked = found is not None
    if found is None:
        found = gold if _undressed(response) == gold else _last_line(response)
    elif len(found) > MAX_ANSWER_CHARS:
        found = ""
    if not found:
        return _result(False, unparsable=True)
    if found == gold:
        return _result(True)
    numbers = _plain_number(gold), _plain_number(found)
    if numbers[0] is not None and numbers[1] is not None:
        return _result(_same_number(*numbers))
    if _explosive(found):
        return _result(False, unparsable=True)
    equal, unparsable = _verify(gold, found, marked)
    return _result(equal, unparsable)


def extract_answer(text: str) -> str | None:
    """Returns what the text marks as its answer, "" when the mark stands before nothing, None when there is none."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return _undressed(boxed)
    hashes = _HASHES.findall(text)
    if hashes:
        return _undressed(hashes[-1])
    stated = [match.end() for match in _ANSWER_IS.finditer(text)]
    if stated:
        line = text[stated[-1] :].partition("\n")[0]
        sentence = _undressed(_SENTENCE_END.split(line, maxsplit=1)[0])
        if _MATHS.search(sentence) or 0 < len(sentence) <= 3:
            return sentence
    return None


def warm_up() -> None:
    """Does what only the first use of `math-verify` costs, half a second, for all processes forked from this one."""
    _verify(r"\frac{1}{2} + x", r"x + \sqrt{2}", marked=True)


def _result(equal: bool, unparsable: bool = False) -> RewardResult:
    return RewardResult(float(equal), {"unparsable": float(unparsable)}, float(equal))


def _gold(answer: Any) -> str:
    text = str(answer) if isinstance(answer, (int, float)) else answer
    if not isinstance(text, str):
        raise RewardError(f"gold answer is not text: {type(answer).__name__}", hint="check the task's answer column")
    boxed = _last_boxed(text)
    if boxed is not None:
        text = boxed
    elif "####" in text:
        text = text.rsplit("####", 1)[1]
    text = _undressed(text)
    if not text or len(text) > MAX_ANSWER_CHARS:
        what = f"longer than {MAX_ANSWER_CHARS} characters" if text else "empty"
        raise RewardError(f"gold answer is {what}: {str(answer)[:80]!r}", hint="check the task's answer column")
    return text


def _last_boxed(text: str) -> str | None:
    """Returns the content of the complete box that opens last; one pass, whatever the text."""
    stack: list[tuple[bool, int]] = []
    best: tuple[int, int] | None = None
    for token in _BOX_TOKEN.finditer(text):
        if token["box"] or token["open"]:
            stack.append((bool(token["box"]), token.end()))
        elif token["close"] and stack:
            is_box, start = stack.pop()
            if is_box and (best is None or start > best[0]):
                best = start, token.start()
    return text[best[0] : best[1]] if best else None


def _undressed(text: str) -> str:
    r"""Strips spaces, bold, a final period, and one pair of `$…$`, `\(…\)` or `\[…\]` around it all."""
    text = text.strip().strip("*").strip().removesuffix(".").rstrip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text[len(opening) : -len(closing)]
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            return text if opening in inner or inner.endswith("\\") else inner.strip()
    return text


def _last_line(response: str) -> str:
    """Returns the answer that an unmarked response ends with: LaTeX with its line, else a number; "" for neither."""
    lines = [line for line in response[-TAIL_CHARS:].splitlines() if line.strip()]
    line = lines[-1] if lines else ""
    if _LATEX.search(line):
        return line
    numbers = list(_PLAIN.finditer(line))
    if not numbers:
        return ""
    start, end = numbers[-1].span()
    if _UNFINISHED.match(line, end):
        return ""
    # In `5-3` the last number is 3: what stands between two numbers is no sign.
    before = line[:start]
    operator = before[-1:].isalnum() or before.rstrip()[-1:].isdigit() or before.rstrip().endswith(")")
    return line[start:end].lstrip("-+ " if operator else "").strip()


def _plain_number(text: str) -> tuple[Fraction, bool] | None:
    """Returns (value, written as per cent) of a plain number, else None; `1,2` and `1 1/2` are not plain."""
    for old, new in ((r"\$", "$"), (r"\%", "%"), ("{,}", ","), ("−", "-")):
        text = text.replace(old, new)
    text = re.sub(r",\\!\s*", ",", text)
    text = re.sub(r"\\[, ]", " ", text)
    match = _PLAIN.fullmatch(text.strip().strip("$").strip())
    if match is None:
        return None
    top, bottom = (
        _value(match[a] or match[b] or match[c] or match[d])
        for a, b, c, d in (("top", "top2", "top3", "spaced"), ("bottom", "bottom2", "bottom3", "bottom"))
    )
    if bottom == 0 or top is None:
        return None
    value = top / (1 if bottom is None else bottom)
    return (-value if match["sign"] == "-" else value), bool(match["percent"])


def _value(digits: str | None) -> Fraction | None:
    return None if digits is None else Fraction(digits.replace(",", "").replace(" ", "").rstrip(".") or "0")


def _same_number(gold: tuple[Fraction, bool], found: tuple[Fraction, bool]) -> bool:
    """`50%` equals `50`, as a question about per cent is often answered, and `1/2`, which it is."""
    if gold[0] == found[0]:
        return True
    if gold[1] == found[1]:
        return False
    return gold[0] / (100 if gold[1] else 1) == found[0] / (100 if found[1] else 1)


def _explosive(text: str) -> bool:
    """True for what is no answer to anything but costs minutes or gigabytes to parse or compute."""
    if _DUNDER.search(text) or re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text):
        return True
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        return True
    factorials = _FACTORIAL.findall(text)
    if len(factorials) > 3 or any(number and int(number) > MAX_FACTORIAL for number in factorials):
        return True
    return any(_exponent(chain) > MAX_EXPONENT for chain in _POWERS.findall(text))


def _exponent(chain: str) -> int:
    """Returns the value of what a chain of powers such as `2^{3^4}` raises its base to, 3^4, or a bound beyond it."""
    exponent = 1
    for digits in reversed(re.findall(r"[0-9]+", chain)[1:]):
        exponent = min(int(digits), MAX_EXPONENT + 1) ** min(exponent, 64)
    return exponent


def _verify(gold: str, found: str, marked: bool) -> tuple[bool, bool]:
    """Returns (equal, unparsable) as `math-verify` sees it, without a time limit."""
    from math_verify import verify

    gold_parsed = _parse(gold, True)
    if not gold_parsed:
        raise RewardError(f"gold answer cannot be parsed: {gold[:80]!r}", hint="check the task's answer column")
    parsed = _parse(found, marked)
    equal = verify(list(gold_parsed), list(parsed), timeout_seconds=None)
    return equal, not equal and all(isinstance(item, str) for item in parsed)


@lru_cache(maxsize=256)  # the samples of a group share their gold answer
def _parse(text: str, marked: bool) -> tuple[Any, ...]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # It warns on every first call that its own time limit is off, which is the point.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # In a sentence the mathematics has to be found first. A marked answer is read whole, as LaTeX, or not at all: a
    # digit picked out of one that does not parse would now and then be the right one.
    sentence = "\\" not in text and _MATHS.search(text) and _WORD.search(text)
    if not marked or sentence or re.search(r"(?<!\\)\$.+\$|\\\(.+\\\)|\\\[.+\\\]", text):
        kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    else:
        text, kinds = rf"\boxed{{{text}}}", [LatexExtractionConfig()]
    return tuple(parse(text, kinds, parsing_timeout=None))
