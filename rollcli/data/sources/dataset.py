"""Problems from a data set: a hub id, or a local file or folder of JSON lines, Parquet or CSV."""

from __future__ import annotations

import hashlib
import json
import logging
import string
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rollcli.config.schema import Problems
from rollcli.data.carriers import Message
from rollcli.data.hub import settle_offline
from rollcli.data.images import MARK, identity, with_images
from rollcli.data.sources.base import Problem, Split, check_template, unit_hash
from rollcli.errors import DatasetNotFound
from rollcli.runs.locations import local_data

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class DatasetSource:
    """Rows of a data set as problems. Rows are read in this process by memory map: nothing forks under Ray."""

    path: str
    """Hub id (`openai/gsm8k`), local file, or local folder with one file per split (`train.jsonl`, `test.jsonl`)."""
    prompt: str = "{question}"
    """The problem's text; `{column}` stands for a column, `{column[key]}` for a part of one that is an object."""
    answer: str | None = "answer"
    """Column with the right answer, or with a list of all that are accepted; `column[key]` is a part of one."""
    choices: str | None = None
    """Column, or `column[key]`, with the choices of a problem: texts, objects with `label` and `text`, or an object
    with a list of each. The prompt shows them as `{choices}`, one a line, as `A. text`."""
    response: str | None = None
    """Column with a demonstration, for supervised fine-tuning."""
    columns: dict[str, str] = field(default_factory=dict)
    """What rewards and environments ask for by other names: `{tests: test_list}`; `column[key]` is a part of one."""
    images: str | None = None
    """Column with the images of a problem: one or a list of paths (relative to the file), bytes, or the hub's images.
    They stand where the prompt says `<image>`, or before it."""
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
        shared = local_data(self.path).is_file() or self.train_split == self.test_split
        if len(rows) == 0:
            raise DatasetNotFound(f"data set `{self.path}` has no rows in split `{split}`", hint="check the file")
        columns = dict.fromkeys(rows.column_names)
        check_template(self.prompt, {**columns, **({"choices": None} if self.choices else {})}, "prompt")
        for option in ("answer", "response", "images", "choices"):
            name = getattr(self, option)
            if name is not None:
                check_template(f"{{{name}}}", columns, option)
        for name, path in self.columns.items():
            check_template(f"{{{path}}}", columns, f"columns.{name}")
        if self.images is not None:
            rows = _undecoded(rows, self.images)
        self._check_parts(rows[0])
        if shared:
            hashes = np.array([unit_hash(identity(self.message(row))) for row in rows])
            # A small file holds out the row with the lowest hash at least.
            held_out = hashes < max(self.held_out_share, np.nextafter(hashes.min(), 1) if len(rows) > 1 else 0)
            rows = rows.select(np.flatnonzero(held_out == (split == "test")))
        if len(rows) == 0:
            raise DatasetNotFound(
                f"`held_out_share` {self.held_out_share} leaves no row of `{self.path}` to the {split} split",
                hint="choose another share, or give a folder with one file per split",
            )
        return DatasetItems(self, rows)

    def message(self, row: dict[str, Any]) -> Message:
        """Returns the user's message of a row."""
        text = self._text(row)
        images = row[self.images] if self.images is not None else None
        images = [] if images is None else images if isinstance(images, list) else [images]
        if self.images is None or (not images and MARK not in text):
            return {"role": "user", "content": text}
        return {"role": "user", "content": with_images(text, [self._found(image) for image in images])}

    def _text(self, row: dict[str, Any]) -> str:
        if self.choices is not None:
            row = {**row, "choices": choice_lines(part(row, self.choices))}
        return self.prompt.format(**row)

    def _check_parts(self, row: dict[str, Any]) -> None:
        """Checks on one row that the parts of columns that options name are there, and choices are choices."""
        for name, path in self.columns.items():
            try:
                part(row, path)
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise DatasetNotFound(
                    f"`columns.{name}` does not fit the data: {type(error).__name__}: {error}",
                    hint=f"the first row: {json.dumps(row, default=str)[:200]}",
                ) from error
        for option in ("answer", "choices", "prompt"):
            try:
                if option == "prompt":
                    self._text(row)
                elif getattr(self, option) is not None:
                    value = part(row, getattr(self, option))
                    if option == "choices":
                        choice_lines(value)
            except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
                raise DatasetNotFound(
                    f"`{option}` does not fit the data: {type(error).__name__}: {error}",
                    hint=f"the first row: {json.dumps(row, default=str)[:200]}",
                ) from error

    def _found(self, image: Any) -> Any:
        """Returns an image as a message holds it: bytes, or a path that is good from everywhere."""
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        local = local_data(self.path)
        if not isinstance(image, str) or "://" in image or not local.exists():
            return image
        return str(((local if local.is_dir() else local.parent) / image).resolve())


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
        payload = dict(row) | {name: part(row, path) for name, path in self.source.columns.items()}
        if self.source.answer is not None:
            payload["answer"] = part(row, self.source.answer)
        if self.source.response is not None:
            payload["response"] = row[self.source.response]
        if self.source.images is not None:
            del payload[self.source.images]  # they are in the message; nobody needs them twice
        return Problem([self.source.message(row)], payload)


def part(row: dict[str, Any], path: str) -> Any:
    """Returns a column, or what lies inside one: `question[stem]`, `answers[0]`.

    Raises:
        KeyError, TypeError, IndexError: it is not there.
    """
    column, _, keys = path.partition("[")
    value = row[column]
    for key in keys.removesuffix("]").split("][") if keys else ():
        value = value[int(key) if isinstance(value, list) and key.isdecimal() else key]
    return value


def choice_lines(choices: Any) -> str:
    """Returns the choices of a problem, one a line, as `A. text`; those without labels get A, B, C, ….

    Raises:
        KeyError, TypeError, ValueError: they are none of the forms that `DatasetSource.choices` names.
    """
    if isinstance(choices, dict):
        pairs = list(zip(choices["label"], choices["text"], strict=True))
    elif all(isinstance(each, str) for each in choices):
        pairs = list(zip(string.ascii_uppercase, choices))
        if len(pairs) != len(choices):
            raise ValueError(f"{len(choices)} choices, and 26 letters")
    else:
        pairs = [(each["label"], each["text"]) for each in choices]
    return "\n".join(f"{label}. {text}" for label, text in pairs)


def _undecoded(rows: Any, column: str) -> Any:
    """Returns rows whose images are bytes or paths: whoever needs the pixels opens them."""
    import datasets

    feature = rows.features[column]
    raw = datasets.Image(decode=False)
    if isinstance(feature, datasets.Image):
        return rows.cast_column(column, raw)
    if isinstance(getattr(feature, "feature", None), datasets.Image):
        return rows.cast_column(column, type(feature)(raw))
    return rows


@cache
def _load(path: str, subset: str | None, revision: str | None, split: str) -> Any:
    local = local_data(path)
    if local.exists():
        return _load_file(_split_file(local, split))
    if local.suffix in _FORMATS or path.startswith((".", "/", "~")):
        raise DatasetNotFound(f"no data file `{path}`", hint="check the path; it is relative to where you are")
    # Its library reads at import whether it may ask the hub.
    settle_offline()
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(path, subset, revision=revision, split=split)
    # The library raises many kinds (connection, unknown split); each becomes one message that names the data.
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DatasetNotFound(
            f"data set `{path}` cannot be loaded: {_first_line(error)}",
            hint="give a local path with `tasks[0].source.path=…`, or go online for a hub id",
        ) from error


def _load_file(file: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    # What it logs about a broken file stands in the error below as well.
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        return datasets.load_dataset(_FORMATS[file.suffix], data_files=str(file), split="train")
    except StopIteration as error:
        raise DatasetNotFound(f"data file `{file}` has no rows", hint="give it some") from error
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        if "no data" in str(error):
            raise DatasetNotFound(f"data file `{file}` has no rows", hint="give it some") from error
        where = _broken_line(file) if file.suffix == ".jsonl" else None
        cause = where or f"`{file}` cannot be read: {_first_line(error.__cause__ or error)}"
        raise DatasetNotFound(cause, hint="mend the file, or take another with `tasks[0].source.path=…`") from error


def _broken_line(file: Path) -> str | None:
    """Returns where a file of JSON lines stops being one."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                json.loads(line)
            except ValueError as error:
                if line.strip():
                    return f"{file}:{number}: not JSON: {error}"
    return None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


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
    picked = sorted({0, len(rows) // 2, len(rows) - 1})
    text = json.dumps([rows[index] for index in picked], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
