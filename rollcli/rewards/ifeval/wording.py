"""IFEval's instructions on words: keywords, letters, case, language, punctuation, openings and endings."""

from __future__ import annotations

import re

from rollcli.errors import RewardError
from rollcli.rewards.ifeval.length import compare

LANGUAGE_CHARS = 20_000
"""What the language is told from; `langdetect` itself looks at 10,000 characters."""


def existence(text: str, keywords: list[str]) -> bool:
    """`keywords:existence`: every keyword stands somewhere, in any case, also inside a word."""
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def frequency(text: str, keyword: str, relation: str, frequency: int) -> bool:
    """`keywords:frequency`: the keyword stands so often."""
    return compare(len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE)), relation, frequency)


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    """`keywords:forbidden_words`: none stands as a word of its own."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_relation: str, let_frequency: int) -> bool:
    """`keywords:letter_frequency`: the letter stands so often, in either case."""
    return compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def response_language(text: str, language: str) -> bool:
    """`language:response_language`: `langdetect` takes it for this language (ISO 639-1), or for none at all."""
    return detected_language(text) in (language, None)


def capital_word_frequency(text: str, capital_relation: str, capital_frequency: int) -> bool:
    """`change_case:capital_word_frequency`: so many words in capitals; hyphens join, apostrophes split."""
    return compare(sum(word.isupper() for word in _words(text)), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """`change_case:english_capital`: English, all in capitals."""
    return text.isupper() and response_language(text, "en")


def english_lowercase(text: str) -> bool:
    """`change_case:english_lowercase`: English, without a capital."""
    return text.islower() and response_language(text, "en")


def no_comma(text: str) -> bool:
    """`punctuation:no_comma`."""
    return "," not in text


def quotation(text: str) -> bool:
    """`startend:quotation`: all of it between double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def end_checker(text: str, end_phrase: str) -> bool:
    """`startend:end_checker`: ends with the phrase, in any case, perhaps inside a quotation."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def detected_language(text: str) -> str | None:
    """Returns the language as ISO 639-1 code, the same for the same text; None when there is nothing to tell it from.

    Raises:
        RewardError: `langdetect` is not installed.
    """
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError as error:
        raise RewardError(
            "an instruction on language needs the package `langdetect`", hint="install `rollcli[ifeval]`"
        ) from error
    DetectorFactory.seed = 0  # it draws at random otherwise, and a verdict would change from call to call
    try:
        return detect(text[:LANGUAGE_CHARS])
    except LangDetectException:
        return None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:[-./]\w+)*", text)
