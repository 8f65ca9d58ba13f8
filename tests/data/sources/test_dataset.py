"""Problems from files: formats, splits, and what the user is told when something is not there."""

import csv
import io
import json
import os
import re
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rollcli.data.sources import dataset
from rollcli.data.sources.dataset import DatasetSource
from rollcli.errors import DatasetNotFound

ROWS = [{"question": f"What is {n}+1?", "answer": str(n + 1), "level": n} for n in range(6)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    dataset._load.cache_clear()


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_each_format_gives_the_same_problems(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "data" / f"train{suffix}", ROWS)
    items = DatasetSource(str(tmp_path / "data"), prompt="{question} (level {level})").open("train", seed=0)
    assert items.size == 6
    assert items[4].messages == [{"role": "user", "content": "What is 4+1? (level 4)"}]
    assert str(items[4].payload["answer"]) == "5" and items[4].payload["level"] == 4
    assert items[4] == items[4] and items[0] != items[4]


def test_a_folder_has_one_file_per_split(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.jsonl", ROWS[:4])
    write(tmp_path / "d" / "test.parquet", ROWS[4:])
    write(tmp_path / "d" / "held.csv", ROWS[:1])
    source = DatasetSource(str(tmp_path / "d"))
    train, test = source.open("train", 0), source.open("test", 0)
    assert (train.size, test.size) == (4, 2)
    assert test[0].payload["question"] == "What is 4+1?"
    assert DatasetSource(str(tmp_path / "d"), test_split="held").open("test", 0).size == 1


def test_named_columns_become_answer_and_demonstration(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"q": "1+1", "gold": "2", "steps": "one and one: 2"}])
    items = DatasetSource(str(path), prompt="{q}", answer="gold", response="steps").open("train", 0)
    assert items[0].payload == {
        "q": "1+1", "gold": "2", "steps": "one and one: 2", "answer": "2", "response": "one and one: 2",
    }  # fmt: skip
    assert "answer" not in DatasetSource(str(path), prompt="{q}", answer=None).open("train", 0)[0].payload


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "{qestion}"}, "`prompt` asks for column `qestion`.*did you mean `question`"),
        ({"answer": "answr"}, "`answer` asks for column `answr`.*did you mean `answer`"),
        ({"response": "levl"}, "`response` asks for column `levl`.*did you mean `level`"),
    ],
)
def test_a_column_that_is_not_there(tmp_path: Path, options: dict, message: str) -> None:
    path = write(tmp_path / "d.jsonl", ROWS)
    with pytest.raises(DatasetNotFound, match=message) as caught:
        DatasetSource(str(path), **options).open("train", 0)
    assert caught.value.hint == "columns: question, answer, level"


def test_columns_answer_to_the_names_that_rewards_ask_for(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "cases": {"test_list": [f"t{n}"]}, "setup_code": ""} for n in range(4)]
    path = write(tmp_path / "rows.jsonl", rows)
    source = DatasetSource(str(path), answer=None, columns={"tests": "cases[test_list]", "setup": "setup_code"})
    payload = source.open("test", 0)[0].payload
    assert payload["tests"] == [f"t{payload['question'][1]}"] and payload["setup"] == "" and "cases" in payload
    for path_of, message in (("case", "asks for column `case`"), ("cases[lists]", "does not fit the data: KeyError")):
        with pytest.raises(DatasetNotFound, match=re.escape(f"`columns.tests` {message}")):
            DatasetSource(str(path), answer=None, columns={"tests": path_of}).open("train", 0)


def test_a_few_problems_of_each_kind_ship_here() -> None:
    items = DatasetSource("embedded:math").open("train", 0)
    assert items.size == 7 and items[0].payload["answer"].rpartition("#### ")[2].isdecimal()
    with pytest.raises(DatasetNotFound, match=r"no embedded data `maths` \(did you mean `math`\?\)"):
        DatasetSource("embedded:maths").open("train", 0)


def test_data_that_is_not_there_or_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    folder = tmp_path / "folder"
    write(folder / "train.jsonl", ROWS)
    empty, broken, text = tmp_path / "empty.jsonl", tmp_path / "broken.jsonl", tmp_path / "data.txt"
    empty.write_text("")
    broken.write_text('{"question": "a", "answer": "b"}\n{"question": \n')
    text.write_text("no")
    for path, message in [
        (tmp_path / "absent.jsonl", "cannot be loaded|absent"),
        (empty, "empty.jsonl` has no rows"),
        (broken, r"broken.jsonl:2: not JSON"),
        (text, "none of .jsonl"),
        (folder, "no file for split `test`"),
        (Path("nobody/nothing"), "nobody/nothing"),
    ]:
        with pytest.raises(DatasetNotFound, match=message) as caught:
            DatasetSource(str(path)).open("test", 0)
        assert caught.value.hint
    headers = tmp_path / "headers.csv"
    headers.write_text("question,answer\n")
    with pytest.raises(DatasetNotFound, match="has no rows"):
        DatasetSource(str(headers)).open("train", 0)


def test_fingerprint_follows_content_and_not_place(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "d.jsonl", ROWS)
    moved = write(tmp_path / "b" / "other.jsonl", ROWS)
    changed = write(tmp_path / "c" / "d.jsonl", [*ROWS[:-1], {**ROWS[-1], "answer": "7"}])
    shorter = write(tmp_path / "d" / "d.jsonl", ROWS[:-1])
    prints = [DatasetSource(str(path)).open("train", 0).fingerprint for path in (first, moved, changed, shorter)]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_reading_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork beside Ray's threads can hang for ever."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("forked")

    monkeypatch.setattr("os.fork", refuse)
    monkeypatch.setattr("multiprocess.Pool", refuse)
    seen: dict = {}
    import datasets

    load = datasets.load_dataset
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: seen.update(k) or load(*a, **k))
    write(tmp_path / "d" / "train.jsonl", ROWS)
    items = DatasetSource(str(tmp_path / "d")).open("train", 0)
    assert items[5].payload["answer"] == "6" and seen.get("num_proc") is None


def test_gsm8k() -> None:
    root = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[3].parent / "shared" / "data")
    if not (root / "gsm8k").exists():
        pytest.skip(f"no test data `gsm8k` in {root}")
    source = DatasetSource(str(root / "gsm8k"))
    train, test = source.open("train", 0), source.open("test", 0)
    assert (train.size, test.size) == (7473, 1319)
    for items in (train, test):
        assert {items.rows[n]["question"] for n in (0, 1)} == {items[n].messages[0]["content"] for n in (0, 1)}
        assert all("#### " in items[n].payload["answer"] for n in (0, items.size // 2, items.size - 1))
    assert not set(train.rows["question"]) & set(test.rows["question"])


def test_one_file_is_divided_and_no_row_is_in_both_splits(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n}+1?", "answer": n + 1} for n in range(300)]
    source = DatasetSource(str(write(tmp_path / "all.jsonl", rows)), held_out_share=0.2)
    train, test = source.open("train", seed=1), source.open("test", seed=2)
    questions = [{items[i].payload["question"] for i in range(items.size)} for items in (train, test)]
    assert questions[0] | questions[1] == {row["question"] for row in rows} and not questions[0] & questions[1]
    assert 30 <= test.size <= 90


def test_a_share_of_one_holds_everything_out(tmp_path: Path) -> None:
    source = DatasetSource(str(write(tmp_path / "all.jsonl", ROWS)), held_out_share=1.0)
    assert source.open("test", seed=0).size == len(ROWS)
    with pytest.raises(DatasetNotFound, match="leaves no row"):
        source.open("train", seed=0)


def test_a_small_file_holds_out_one_row_at_least(tmp_path: Path) -> None:
    source = DatasetSource(str(write(tmp_path / "few.jsonl", ROWS)), held_out_share=1e-6)
    assert (source.open("train", 0).size, source.open("test", 0).size) == (len(ROWS) - 1, 1)


def test_images_are_paths_or_bytes_in_the_message(tmp_path: Path) -> None:
    rows = [{"question": "why?", "answer": "1", "images": [f"{n}.png", "/elsewhere/b.png"]} for n in range(20)]
    file = write(tmp_path / "problems.jsonl", rows)
    source = DatasetSource(str(file), images="images")
    items = source.open("train", 0)
    # The questions are all the same: what tells problems apart is what they show.
    assert 0 < source.open("test", 0).size < 20 and items.size + source.open("test", 0).size == 20
    content = items[0].messages[0]["content"]
    assert [part.get("image") or part["text"] for part in content] == [
        str(tmp_path / content[0]["image"].rpartition("/")[2]), "/elsewhere/b.png", "why?",
    ]  # fmt: skip
    assert "images" not in items[0].payload and items[0].payload["answer"] == "1"
    raw = [{"question": "<image>?", "answer": "1", "image": {"bytes": b"png", "path": "a.png"}}, ROWS[0]]
    file = write(tmp_path / "raw" / "train.parquet", [{**row, "level": 0} for row in raw])
    items = DatasetSource(str(file.parent), images="image").open("train", 0)
    assert items[0].messages[0]["content"] == [{"type": "image", "image": b"png"}, {"type": "text", "text": "?"}]
    assert items[1].messages[0]["content"] == "What is 0+1?"
    with pytest.raises(DatasetNotFound, match="`images` asks for column `pictures`"):
        DatasetSource(str(file.parent), images="pictures").open("train", 0)


def test_the_hubs_images_are_not_decoded(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    features = datasets.Features({
        "question": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image(),
        "images": datasets.List(datasets.Image()),
    })  # fmt: skip
    png = io.BytesIO()
    Image.new("RGB", (4, 4)).save(png, "PNG")
    picture = {"bytes": png.getvalue(), "path": None}
    rows = [{"question": "why?", "answer": "1", "image": picture, "images": [picture, picture]}]
    datasets.Dataset.from_list(rows, features=features).to_parquet(file)
    for column, count in {"image": 1, "images": 2}.items():
        items = DatasetSource(str(tmp_path), prompt="{question}", images=column).open("train", 0)
        assert [part.get("image") for part in items[0].messages[0]["content"]] == [png.getvalue()] * count + [None]


def shared(name: str) -> Path:
    root = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[3].parent / "shared" / "data")
    if not (root / name).exists():
        pytest.skip(f"no test data `{name}` in {root}")
    return root / name


@pytest.mark.parametrize(
    "choices",
    [["bank", "mall"], {"label": ["A", "B"], "text": ["bank", "mall"]},
     [{"label": "A", "text": "bank"}, {"label": "B", "text": "mall"}]],
)  # fmt: skip
def test_choices_in_each_form(tmp_path: Path, choices: object) -> None:
    path = write(tmp_path / "d.jsonl", [{"q": {"stem": "Where?", "choices": choices}, "gold": ["B", "b"]}])
    options = {"prompt": "{q[stem]}\n{choices}", "choices": "q[choices]", "answer": "gold[0]"}
    problem = DatasetSource(str(path), **options).open("train", 0)[0]
    assert problem.messages[0]["content"] == "Where?\nA. bank\nB. mall" and problem.payload["answer"] == "B"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "{question[stem]}"}, "`prompt` does not fit the data"),
        ({"answer": "answer[key]"}, "`answer` does not fit the data"),
        ({"choices": "level"}, "`choices` does not fit the data"),
        ({"choices": "levl"}, "`choices` asks for column `levl`.*did you mean `level`"),
        ({"prompt": "{choices}"}, "`prompt` asks for column `choices`"),
    ],
)
def test_a_part_that_is_not_there(tmp_path: Path, options: dict, message: str) -> None:
    path = write(tmp_path / "d.jsonl", ROWS)
    with pytest.raises(DatasetNotFound, match=message):
        DatasetSource(str(path), **options).open("train", 0)


def test_commonsenseqa() -> None:
    path = shared("commonsenseqa") / "dev_rand_split.jsonl"
    options = {"prompt": "{question[stem]}\n{choices}", "choices": "question[choices]", "answer": "answerKey"}
    source = DatasetSource(str(path), **options)
    train, test = source.open("train", 0), source.open("test", 0)
    assert train.size + test.size == 1221
    lines = train[0].messages[0]["content"].splitlines()
    assert [line[:3] for line in lines[1:]] == ["A. ", "B. ", "C. ", "D. ", "E. "]
    assert {train[n].payload["answer"] for n in range(100)} == set("ABCDE")


def test_webquestions() -> None:
    options = {"prompt": "{qText}", "answer": "answers", "train_split": "trainmodel"}
    source = DatasetSource(str(shared("webquestions")), **options)
    test = source.open("test", 0)
    assert (source.open("train", 0).size, test.size) == (2834, 2032)
    assert test[0].messages[0]["content"] == "what does jamaican people speak?"
    assert test[0].payload["answer"] == ["Jamaican Creole English Language", "Jamaican English"]


def test_ifeval() -> None:
    path = shared("ifeval") / "input_data.jsonl"
    items = DatasetSource(str(path), prompt="{prompt}", answer=None).open("train", 0)
    problem = items[0]
    assert problem.messages[0]["content"] == problem.payload["prompt"]
    assert len(problem.payload["instruction_id_list"]) == len(problem.payload["kwargs"])
