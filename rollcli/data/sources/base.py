"""What a source of problems is: options in, an indexable sequence of problems out."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollcli.data.carriers import Message
from rollcli.errors import DatasetNotFound
from rollcli.suggest import did_you_mean

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Problem:
    """One problem as a source gives it. `payload["response"]`, where present, is a demonstration."""

    messages: list[Message]
    payload: dict[str, Any] = field(default_factory=dict)


class Items(Protocol):
    """Problems of one split. Item `i` is always the same problem."""

    fingerprint: str
    """Identity of the content; a resume with other content is refused."""

    def __getitem__(self, index: int) -> Problem:
        """Returns problem `index`."""

    @property
    def size(self) -> int | None:
        """Number of problems; None when they are generated and never end."""


class Source(Protocol):
    """A source's options. Its class is a dataclass, so a recipe's block is checked against its fields."""

    def open(self, split: Split, seed: int) -> Items:
        """Returns the problems of a split; train and test never share one.

        Raises:
            DatasetNotFound: the data is not there, or lacks a column the options name.
        """


def check_template(template: str, known: Mapping[str, Any], option: str) -> None:
    """Checks that every `{name}` of a template is a known column; in `{name[key]}` only the column is checked.

    Raises:
        DatasetNotFound: with the columns there are; or the template's braces do not match.
    """
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template)]
    except ValueError as error:
        raise DatasetNotFound(
            f"`{option}` is not a template: {error}", hint="write `{{` and `}}` for braces that are text"
        ) from error
    for name in fields:
        name = name and name.partition("[")[0]
        if name is not None and name not in known:
            meant = did_you_mean(name, known)
            raise DatasetNotFound(
                f"`{option}` asks for column `{name}`, which the data does not have"
                + (f" (did you mean `{meant}`?)" if meant else ""),
                hint=f"columns: {', '.join(known)}",
            )


def unit_hash(text: str) -> float:
    """Returns a number in [0, 1) that depends on the text alone: what is held out stays held out, whatever the seed."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56
