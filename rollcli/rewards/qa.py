"""Scores short answers to open questions against all that are accepted, as SQuAD does (arXiv 1606.05250, section 6.1).

Texts are compared in lower case, without punctuation, articles and surplus spaces.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from rollcli.errors import RewardError
from rollcli.rewards.answers import stated_answer
from rollcli.rewards.base import RewardResult

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def qa(response: str, answer: str | Sequence[str]) -> RewardResult:
    r"""Scores a response 1 when its answer is one of those accepted, else 0: exact match.

    Args:
        response: decoded text; what it marks as its answer (`<answer>`, `\boxed{}`, `#### `, "answer is") counts, else
            all of it.
        answer: the right answer, or all that are accepted.

    Returns:
        score and accuracy, 0 or 1, and the metric `qa_f1`, see `f1`.

    Raises:
        RewardError: no answer is accepted, or one of them is empty.
    """
    exact, overlap = _scores(response, answer)
    return RewardResult(exact, {"qa_f1": overlap}, exact)


def qa_f1(response: str, answer: str | Sequence[str]) -> RewardResult:
    """Scores a response by the best F1 of its words with an accepted answer; accuracy is the exact match of `qa`."""
    exact, overlap = _scores(response, answer)
    return RewardResult(overlap, {"qa_exact": exact}, exact)


def normalized(text: str) -> str:
    """Returns text in lower case without punctuation, articles and surplus spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1(found: str, gold: str) -> float:
    """Returns the harmonic mean of precision and recall of the words two normalized texts share, with multiplicity."""
    found_words, gold_words = found.split(), gold.split()
    shared = sum((Counter(found_words) & Counter(gold_words)).values())
    return 2 * shared / (len(found_words) + len(gold_words)) if shared else 0.0


def _scores(response: str, answer: str | Sequence[str]) -> tuple[float, float]:
    accepted = [answer] if isinstance(answer, (str, int, float)) else list(answer or ())
    # An answer such as "The The" that normalizes to nothing is compared as it stands.
    golds = [normalized(str(each)) or str(each).strip().lower() for each in accepted]
    if not golds or "" in golds:
        raise RewardError(f"accepted answers are empty: {str(answer)[:80]}", hint="check the task's answer column")
    stated = stated_answer(response)
    text = response if stated is None else stated
    found = normalized(text) or text.strip().lower()
    return float(found in golds), max(f1(found, gold) for gold in golds)
