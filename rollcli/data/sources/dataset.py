"""Problems from a data set: a hub id, or a local file or folder of JSON lines, Parquet or CSV."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rollcli.config.schema import Problems
from rollcli.data.hub import settle_offline
from rollcli.data.sources.base import Problem, Split, check_template, unit_hash
from rollcli.errors import DatasetNotFound

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class DatasetSource:
    """Rows of a data set as problems. Rows are read in this process by memory map: nothing forks under Ray."""

    path: str
    """Hub id (`openai/gsm8k`), local file, or local folder with one file per split (`train.jsonl`, `test.jsonl`)."""
    prompt: str = "{question}"
    """The problem's text; `{column}` stands for a column."""
    answer: str | None = "answer"
    """Column with the right answer."""
    response: str | None = None
    """Column with a demonstration, for supervised fine-tuning."""
    subset: str | None = None
    """Configuration of a hub data set."""
    revision: str | None = None
    """Revision of a hub data set."""
    train_split: str = "train"
    """The data set's name for the split to train on."""
    test_split: str = "test"
    """The data set's name for the held-out split."""
    held_out_share: float = 0.1
    """Share of the rows held out when there is one file, or one split, for both training and evaluation."""

    def problems(self) -> Problems:
        """Yields what makes no sense."""
        if not 0 < self.held_out_share <= 1:
            yield "held_out_share", f"must be greater than 0 and at most 1, is {self.held_out_share}"

    def open(self, split: Split, seed: int) -> DatasetItems:
        """Returns the rows of a split; rows that both splits would share are divided by a hash of their prompt."""
        rows = _load(self.path, self.subset, self.revision, self.train_split if split == "train" else self.test_split)
        shared = Path(self.path).expanduser().is_file() or self.train_split == self.test_split
        if len(rows) == 0:
            raise DatasetNotFound(f"data set `{self.path}` has no rows in split `{split}`", hint="check the file")
        columns = dict.fromkeys(rows.column_names)
        check_template(self.prompt, columns, "prompt")
        for option in ("answer", "response"):
            name = getattr(self, option)
            if name is not None:
                check_template(f"{{{name}}}", columns, option)
        if shared:
            held_out = np.array([unit_hash(self.prompt.format(**row)) < self.held_out_share for row in rows])
            rows = rows.select(np.flatnonzero(held_out == (split == "test")))
        if len(rows) == 0:
            raise DatasetNotFound(
                f"`held_out_share` {self.held_out_share} leaves no row of `{self.path}` to the {split} split",
                hint="choose another share, or give a folder with one file per split",
            )
        return DatasetItems(self, rows)


class DatasetItems:
    """Rows as problems."""

    def __init__(self, source: DatasetSource, rows: Any) -> None:
        self.source = source
        self.rows = rows
        self.fingerprint = f"{len(rows)} rows:{_content_digest(rows)}"

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Problem:
        row = self.rows[index]
        payload = dict(row)
        if self.source.answer is not None:
            payload["answer"] = row[self.source.answer]
        if self.source.response is not None:
            payload["response"] = row[self.source.response]
        return Problem([{"role": "user", "content": self.source.prompt.format(**row)}], payload)


@cache
def _load(path: str, subset: str | None, revision: str | None, split: str) -> Any:
    # Its library reads at import whether it may ask the hub.
    if not (local := Path(path).expanduser()).exists():
        settle_offline()
    import datasets

    datasets.disable_progress_bars()
    try:
        if local.exists():
            file = _split_file(local, split)
            return datasets.load_dataset(_FORMATS[file.suffix], data_files=str(file), split="train")
        return datasets.load_dataset(path, subset, revision=revision, split=split)
    except DatasetNotFound:
        raise
    # The library raises many kinds (connection, parsing, unknown split); each becomes one message that names the data.
    except (OSError, ValueError, RuntimeError, KeyError, StopIteration, datasets.exceptions.DatasetsError) as error:
        empty = isinstance(error, StopIteration)
        reason = "the file is empty" if empty else str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DatasetNotFound(
            f"data set `{path}` cannot be loaded: {reason}",
            hint="give a local path with `tasks[0].source.path=…`, or go online for a hub id",
        ) from error


def _split_file(path: Path, split: str) -> Path:
    if path.is_file():
        if path.suffix not in _FORMATS:
            raise DatasetNotFound(f"`{path}` is none of {', '.join(_FORMATS)}", hint="convert it to JSON lines")
        return path
    found = [path / f"{split}{suffix}" for suffix in _FORMATS if (path / f"{split}{suffix}").is_file()]
    if not found:
        there = sorted(file.name for file in path.iterdir() if file.suffix in _FORMATS)
        raise DatasetNotFound(
            f"folder `{path}` has no file for split `{split}`", hint=f"files there: {', '.join(there) or 'none'}"
        )
    return found[0]


def _content_digest(rows: Any) -> str:
    """Digest of the first, middle and last rows: cheap, and enough to notice another file of the same length."""
    import hashlib
    import json

    picked = sorted({0, len(rows) // 2, len(rows) - 1})
    text = json.dumps([rows[index] for index in picked], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
