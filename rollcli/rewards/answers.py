"""Where a response says its answer, for rewards that compare text: `choice` and `qa`."""

from __future__ import annotations

import re

_STATED = re.compile(r"\banswer[ \t]*(?:is\b|:|=)[ \t:*]*", re.IGNORECASE)


def stated_answer(response: str) -> str | None:
    r"""Returns what stands in the last `<answer>…</answer>`, else in the last `\boxed{…}`, else after the last `#### `,
    else after the last "answer is" or "answer:" up to the end of its line; None when there is no such mark.

    Takes time linear in the response.
    """
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, end) if end >= 0 else -1
    if start >= 0:
        return response[start + len("<answer>") : end].strip()
    start = response.rfind(r"\boxed{")
    if start >= 0:
        inside = response[start + len(r"\boxed{") :].partition("}")[0].strip()
        return inside.removeprefix(r"\text{").strip()
    if "#### " in response:
        return response.rpartition("#### ")[2].partition("\n")[0].strip()
    ends = [match.end() for match in _STATED.finditer(response)]
    return response[ends[-1] :].partition("\n")[0].strip() if ends else None
