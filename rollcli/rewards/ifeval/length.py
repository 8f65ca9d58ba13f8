"""IFEval's instructions on length: words, sentences, paragraphs. Every function takes time linear in the text."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+")
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st sr jr inc ltd co corp vs etc e.g i.e u.s u.k u.n a.m p.m no vol jan feb aug sept oct nov dec "
    "gen col sgt capt lt rev hon ph.d d.c".split()
)
_CLOSERS = "\"')]}*_”’"
_OPENERS = "\"'([{*_“‘"


def compare(count: int, relation: str, bound: int) -> bool:
    """Returns whether a count is `less than` or `at least` a bound.

    Raises:
        ValueError: any other relation.
    """
    if relation not in ("less than", "at least"):
        raise ValueError(f"relation `{relation}` is neither `less than` nor `at least`")
    return count < bound if relation == "less than" else count >= bound


def number_words(text: str, relation: str, num_words: int) -> bool:
    """`length_constraints:number_words`; a word is a run of letters, digits and underscores."""
    return compare(sum(1 for _ in _WORD.finditer(text)), relation, num_words)


def number_sentences(text: str, relation: str, num_sentences: int) -> bool:
    """`length_constraints:number_sentences`; see `count_sentences`."""
    return compare(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """`length_constraints:number_paragraphs`: parts between `***`, none empty except before the first or last mark."""
    parts = [part.strip() for part in text.split("***")]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """`length_constraints:nth_paragraph_first_word`: so many parts between empty lines; one opens with a word."""
    parts = text.split("\n\n")
    full = sum(1 for part in parts if part.strip())
    # As the reference does: empty parts count for the place of a paragraph, and not for how many there are.
    if not 1 <= nth_paragraph <= full or not parts[nth_paragraph - 1].strip():
        return False
    opening = parts[nth_paragraph - 1].split(maxsplit=1)[0].lstrip("'").lstrip('"')
    return full == num_paragraphs and re.split(r"[.,?!'\"]", opening, maxsplit=1)[0].lower() == first_word.lower()


def count_sentences(text: str) -> int:
    """Returns the number of sentences.

    The reference asks NLTK's Punkt model, which would have to be downloaded. Here a sentence ends at a word that ends
    with `.`, `?` or `!`, save common abbreviations, initials, and a period before a lower-case word.
    """
    words = text.split()
    ends = 0
    for word, following in zip(words, [*words[1:], ""]):
        ends += following == "" or _ends_sentence(word, following)
    return ends


def _ends_sentence(word: str, following: str) -> bool:
    bare = word.rstrip(_CLOSERS)
    if bare.endswith(("?", "!")):
        return True
    if not bare.endswith("."):
        return False
    next_word = following.lstrip(_OPENERS)
    stem = bare[:-1].lstrip(_OPENERS)
    if stem.lower() in _ABBREVIATIONS or (len(stem) == 1 and stem.isupper() and stem != "I"):
        return False
    # An ellipsis and a number with its period end a sentence only where a new one visibly begins.
    if stem.endswith(".") or stem.isdigit():
        return next_word[:1].isupper()
    return True
