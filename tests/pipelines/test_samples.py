import json

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from rollcli.data.batch import Batch
from rollcli.pipelines.samples import COLUMNS, SHOWN, viewer_samples, write_rollouts
from tests.pipelines.groups import failed, group, trajectory


@pytest.fixture
def groups():
    return [
        group(
            "sums", 4,
            trajectory(
                0, 2, [3, 3], reward=1.0, accuracy=1.0, stop_reason="stop", rewards={"math": 1.0, "format": 0.5},
                prompt_text="<user>1+1", response_text="2 é\n日本",
            ),
            failed("sums", 4, 1),
            trajectory(2, 2, [3, 3, 4], reward=0.0, stop_reason="length", rewards={"math": 0.0}),
        ),
        group("words", 1, trajectory(0, 1, [3], reward=0.25, stop_reason="stop")),
    ]  # fmt: skip


def batch_of(groups, advantages):
    """Returns the batch of the usable ones, each with one advantage on all its sampled tokens."""
    batch = Batch.from_groups(groups)
    batch.tokens["advantages"] = (np.array(advantages)[batch.rows] * batch.tokens["loss_mask"]).astype(np.float32)
    return batch


def test_one_row_per_trajectory_failed_ones_included(groups, tmp_path):
    file = tmp_path / "rollouts" / "step_000009.parquet"
    write_rollouts(file, 9, groups, batch_of(groups, [1.5, -1.5, 0.25]))
    rows = pq.read_table(file).to_pylist()
    assert [(row["step"], row["task"], row["index"], row["sample"]) for row in rows] == [
        (9, "sums", 4, 0), (9, "sums", 4, 1), (9, "sums", 4, 2), (9, "words", 1, 0),
    ]  # fmt: skip
    assert [row["advantage"] for row in rows] == [1.5, None, -1.5, 0.25]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0, 0.25]
    assert [row["response_tokens"] for row in rows] == [2, 0, 3, 1]
    assert [row["error_kind"] for row in rows] == [None, "timeout", None, None]
    assert rows[1]["error"] == "took too long" and rows[1]["tokens"] == []
    assert rows[0]["prompt"] == "<user>1+1" and rows[0]["response"] == "2 é\n日本"
    assert rows[2]["prompt"] == "question 4"  # no text of its own
    assert json.loads(rows[0]["rewards"]) == {"math": 1.0, "format": 0.5}
    assert rows[2]["tokens"] == [0, 1, 2, 3, 4]
    assert rows[2]["loss_mask"] == [False, False, True, True, True]
    assert rows[2]["logprobs"] == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert rows[2]["versions"] == [-1, -1, 3, 3, 4]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_an_advantage_that_differs_by_token_is_shown_by_its_mean(groups, tmp_path):
    batch = batch_of(groups, [0, 0, 0])
    batch.tokens["advantages"][:4] = [0, 0, 1.0, 3.0]
    write_rollouts(tmp_path / "a.parquet", 1, groups, batch)
    assert pq.read_table(tmp_path / "a.parquet")["advantage"].to_pylist() == [2.0, None, 0.0, 0.0]


def test_without_a_batch_there_are_no_advantages(groups, tmp_path):
    write_rollouts(tmp_path / "a.parquet", 1, groups)
    assert pq.read_table(tmp_path / "a.parquet")["advantage"].to_pylist() == [None] * 4


def test_files_of_all_steps_have_the_same_types_and_read_as_one(groups, tmp_path):
    write_rollouts(tmp_path / "step_000001.parquet", 1, groups, batch_of(groups, [0, 0, 0]))
    write_rollouts(tmp_path / "step_000002.parquet", 2, groups[1:])  # no error at all
    write_rollouts(tmp_path / "step_000003.parquet", 3, [group("sums", 1, failed("sums", 1, 0))])  # no token at all
    write_rollouts(tmp_path / "step_000004.parquet", 4, [])
    schemas = {str(pq.read_schema(file).remove_metadata()) for file in tmp_path.iterdir()}
    assert len(schemas) == 1
    schema = pq.read_schema(tmp_path / "step_000004.parquet")
    assert schema.names == list(COLUMNS)
    assert schema.field("tokens").type == pa.list_(pa.int32()) and schema.field("error").type == pa.string()
    whole = pyarrow.dataset.dataset(tmp_path, format="parquet").to_table()
    assert whole["step"].to_pylist() == [1, 1, 1, 1, 2, 3]


def test_the_datasets_library_reads_them(groups, tmp_path):
    import datasets

    write_rollouts(tmp_path / "step_000001.parquet", 1, groups)
    write_rollouts(tmp_path / "step_000002.parquet", 2, groups[1:])
    rows = datasets.Dataset.from_parquet(
        [str(tmp_path / f"step_00000{step}.parquet") for step in (1, 2)], cache_dir=str(tmp_path / "cache")
    )
    assert rows["step"][:] == [1, 1, 1, 1, 2]


def test_a_viewer_sees_the_worst_the_best_and_some_between():
    groups = [group("sums", n, *(trajectory(s, 1, [0], reward=n + s / 10) for s in range(4))) for n in range(5)]
    advantages = [n * 4 + s for n in range(5) for s in range(4)]
    shown = viewer_samples(groups, batch_of(groups, advantages))
    assert len(shown) == SHOWN
    assert [item["reward"] for item in shown] == sorted(item["reward"] for item in shown)
    assert (shown[0]["reward"], shown[-1]["reward"]) == (0.0, 4.3)
    assert (shown[0]["advantage"], shown[-1]["advantage"]) == (0.0, 19.0)
    assert (shown[0]["task"], shown[-1]["task"]) == ("sums/0", "sums/4")
    json.dumps(shown)


def test_a_viewer_sees_each_sample_once_and_only_usable_ones(groups):
    shown = viewer_samples(groups, batch_of(groups, [1, 2, 3]))
    assert [(item["reward"], item["advantage"]) for item in shown] == [(0.0, 2.0), (0.25, 3.0), (1.0, 1.0)]
    assert viewer_samples([], Batch.from_groups([])) == []


def test_a_viewer_gets_the_ends_of_long_texts():
    long = group("sums", 0, trajectory(0, 1, [0], prompt_text="p" * 5000 + "!", response_text="r" * 9000 + "?"))
    (item,) = viewer_samples([long], batch_of([long], [0]))
    assert len(item["prompt"]) == 2000 and item["prompt"].endswith("!")
    assert len(item["response"]) == 4000 and item["response"].endswith("?")
