"""Scores a response by the verifiable instructions of IFEval (Zhou et al., arXiv 2311.07911): 1 when all are kept.

`strict` reads the response as it is. `loose` also tries it without its first line, its last, both, and each of these
without asterisks, and an instruction is kept when it is in any of the eight: what a model says around its answer, and
the Markdown in it, is forgiven.

Verdicts are the reference checker's, but two of its tools need a download of NLTK and are imitated: its sentence
splitter, and its tokenizer for words in capitals. Keywords are literal text, not regular expressions.

Of the reference's 1,664 verdicts on GPT-4's 540 answers one differs: in problem 1122 the letter to count is `#`, which
the reference takes for no letter and replaces by one drawn at random, anew for each of its two readings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollcli.errors import RewardError
from rollcli.rewards.base import RewardResult
from rollcli.rewards.ifeval import layout, length, wording

VERIFIERS: dict[str, Callable[..., bool]] = {
    "keywords:existence": wording.existence,
    "keywords:frequency": wording.frequency,
    "keywords:forbidden_words": wording.forbidden_words,
    "keywords:letter_frequency": wording.letter_frequency,
    "language:response_language": wording.response_language,
    "length_constraints:number_sentences": length.number_sentences,
    "length_constraints:number_paragraphs": length.number_paragraphs,
    "length_constraints:number_words": length.number_words,
    "length_constraints:nth_paragraph_first_word": length.nth_paragraph_first_word,
    "detectable_content:number_placeholders": layout.number_placeholders,
    "detectable_content:postscript": layout.postscript,
    "detectable_format:number_bullet_lists": layout.number_bullet_lists,
    "detectable_format:constrained_response": layout.constrained_response,
    "detectable_format:number_highlighted_sections": layout.number_highlighted_sections,
    "detectable_format:multiple_sections": layout.multiple_sections,
    "detectable_format:json_format": layout.json_format,
    "detectable_format:title": layout.title,
    "combination:two_responses": layout.two_responses,
    "combination:repeat_prompt": layout.repeat_prompt,
    "startend:end_checker": wording.end_checker,
    "startend:quotation": wording.quotation,
    "change_case:capital_word_frequency": wording.capital_word_frequency,
    "change_case:english_capital": wording.english_capital,
    "change_case:english_lowercase": wording.english_lowercase,
    "punctuation:no_comma": wording.no_comma,
}
"""All 25 instructions, by the names of the paper's data."""


def ifeval(
    response: str, instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None]
) -> RewardResult:
    """Scores a response 1 when it keeps every instruction as it is read strictly, else 0.

    Args:
        response: decoded text, any text at all.
        instruction_id_list: names of instructions, `group:name`.
        kwargs: arguments of each; those that are null count as not given.

    Returns:
        score and accuracy, 0 or 1; the metrics `ifeval_strict` and `ifeval_loose`, 1 when all instructions are kept as
        read so, and `ifeval_instructions_strict` and `…_loose`, the share of instructions kept.

    Raises:
        RewardError: no instruction, an unknown one, or arguments that do not fit it.
    """
    strict, loose = verdicts(response, instruction_id_list, kwargs)
    return _result(strict, strict, loose)


def ifeval_loose(
    response: str, instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None]
) -> RewardResult:
    """Scores as `ifeval` does, but reads the response loosely; raises what `ifeval` raises."""
    strict, loose = verdicts(response, instruction_id_list, kwargs)
    return _result(loose, strict, loose)


def verdicts(
    response: str, instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None]
) -> tuple[list[bool], list[bool]]:
    """Returns whether each instruction is kept, strictly and loosely; raises what `ifeval` raises."""
    if not instruction_id_list or len(instruction_id_list) != len(kwargs):
        raise RewardError(
            f"{len(instruction_id_list)} instructions with arguments for {len(kwargs)}",
            hint="`instruction_id_list` and `kwargs` have one entry for each instruction, at least one",
        )
    pairs = list(zip(instruction_id_list, kwargs))
    strict = [_kept(response, *pair) for pair in pairs]
    readings = _readings(response)
    loose = [kept or any(_kept(text, *pair) for text in readings) for kept, pair in zip(strict, pairs)]
    return strict, loose


def _readings(response: str) -> list[str]:
    """Returns the seven other readings of a response that count loosely, each once."""
    lines = response.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    readings = dict.fromkeys([*cut, *(text.replace("*", "") for text in (response, *cut))])
    return [text for text in readings if text != response]


def _kept(text: str, instruction: str, arguments: Mapping[str, Any] | None) -> bool:
    if instruction not in VERIFIERS:
        raise RewardError(f"unknown instruction `{instruction}`", hint=f"known: {', '.join(VERIFIERS)}")
    given = {name: value for name, value in (arguments or {}).items() if value is not None}
    try:
        return bool(text.strip()) and VERIFIERS[instruction](text, **given)
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardError(
            f"arguments {given} do not fit instruction `{instruction}`: {error}", hint="check the column `kwargs`"
        ) from error


def _result(decisive: list[bool], strict: list[bool], loose: list[bool]) -> RewardResult:
    score = float(all(decisive))
    # The same numbers under the same names from both rewards: in one task neither takes the other's place.
    metrics = {
        "ifeval_strict": float(all(strict)),
        "ifeval_loose": float(all(loose)),
        "ifeval_instructions_strict": sum(strict) / len(strict),
        "ifeval_instructions_loose": sum(loose) / len(loose),
    }
    return RewardResult(score, metrics, score)
