import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from rollcli.data.batch import Batch
from rollcli.data.carriers import Trajectory
from rollcli.errors import ReplayError
from rollcli.pipelines.origin import Origin
from rollcli.pipelines.samples import COLUMNS, SHOWN, read_origin, read_rollouts, viewer_samples, write_rollouts
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


def test_a_viewer_gets_several_turns_as_a_talk():
    chat = [
        {"role": "user", "content": "P_G"}, {"role": "assistant", "content": "left", "turn": 0},
        {"role": "user", "content": "PG"}, {"role": "assistant", "content": "right", "turn": 1},
    ]  # fmt: skip
    played = trajectory(0, 1, [0, 0], turns=[(1, 2), (2, 3)], chat=chat, prompt_text="P_G\nPG", agent="first")
    once = trajectory(1, 1, [0], turns=[(1, 2)], chat=chat[:2], prompt_text="P_G", response_text="left")
    shown = viewer_samples([made := group("sums", 0, played, once)], batch_of([made], [0, 0]))
    assert [(item["prompt"], item["response"], item.get("agent")) for item in shown] == [
        ("P_G", "assistant: left\nuser: PG\nassistant: right", "first"), ("P_G", "left", None),
    ]  # fmt: skip


def test_a_file_of_before_chats_were_kept_is_read(varied, tmp_path):
    write_rollouts(tmp_path / "a.parquet", 1, varied)
    pq.write_table(pq.read_table(tmp_path / "a.parquet").drop_columns(["chat"]), tmp_path / "b.parquet")
    read = read_rollouts(tmp_path / "b.parquet")
    assert read[0].trajectories[0].chat == [] and read[0].trajectories[0].turns == [(3, 5), (5, 7)]


def assert_same(read: Trajectory, written: Trajectory) -> None:
    """Compares every field, the types and bits of arrays included."""
    for member in dataclasses.fields(Trajectory):
        one, other = getattr(read, member.name), getattr(written, member.name)
        if isinstance(other, np.ndarray):
            assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), member.name
        else:
            assert one == other and type(one) is type(other), member.name


@pytest.fixture
def varied():
    """Groups in which every field of a trajectory has a value of its own."""
    played = trajectory(
        0, 3, [3, 3, 4, 4], reward=0.1 + 0.2, accuracy=1 / 3, stop_reason="length", budget=48,
        turns=[(3, 5), (5, 7)], turn_rewards=[0.1, -1e-300], state_keys=["#_#\nP", "日本 \U0001f600"],
        rewards={"math": 1.0, "format": 1 / 7}, metrics={"unparsable": 0.0, "reward_failed/math": 1.0},
        prompt_text="<user>é", response_text="",
        chat=[{"role": "user", "content": "é"}, {"role": "assistant", "content": "ü", "turn": 0}],
    )  # fmt: skip
    played.logprobs = np.random.default_rng(0).normal(size=7).astype(np.float32)
    spoiled = failed("sums", 4, 1)
    spoiled.spoils_group = True
    first = group("sums", 4, played, spoiled, trajectory(2, 1, [], reward=-0.0))
    first.greedy = [trajectory(3, 1, [4], reward=0.75, response_text="greedy")]
    first.greedy[0].task_id = "sums/4"
    first.task = dataclasses.replace(first.task, seed=2**63 - 1, row=17)
    # The same task again, and a failed greedy one.
    again = group("sums", 4, trajectory(0, 1, [0]))
    again.greedy = [failed("sums", 4, 1)]
    held = group("words", 1, trajectory(0, 1, [2], reward=float("inf")))
    held.task = dataclasses.replace(held.task, split="test")
    held.trajectories[0].task_id = "words/test/1"
    return [first, again, held]


def test_groups_are_read_as_they_were_written(varied, tmp_path):
    write_rollouts(tmp_path / "a.parquet", 1, varied)
    read = read_rollouts(tmp_path / "a.parquet")
    assert len(read) == len(varied)
    for one, other in zip(read, varied, strict=True):
        assert one.task == other.task and one.id == other.id
        assert len(one.trajectories) == len(other.trajectories)
        for pair in zip(one.trajectories, other.trajectories, strict=True):
            assert_same(*pair)
        assert len(one.greedy) == len(other.greedy)
        for mine, theirs in zip(one.greedy, other.greedy, strict=True):
            assert_same(mine, theirs)


def test_a_batch_of_what_was_read_is_the_same_batch(varied, groups, tmp_path):
    for number, written in enumerate((varied, groups, [])):
        write_rollouts(tmp_path / f"{number}.parquet", 1, written)
        one, other = Batch.from_groups(read_rollouts(tmp_path / f"{number}.parquet")), Batch.from_groups(written)
        np.testing.assert_array_equal(one.offsets, other.offsets)
        for columns, expected in ((one.tokens, other.tokens), (one.samples, other.samples)):
            assert list(columns) == list(expected)
            for name in expected:
                assert columns[name].dtype == expected[name].dtype
                np.testing.assert_array_equal(columns[name], expected[name], err_msg=name)


def test_a_payload_is_not_kept(groups, tmp_path):
    groups[0].task = dataclasses.replace(groups[0].task, payload={"answer": object()})
    write_rollouts(tmp_path / "a.parquet", 1, groups)
    assert read_rollouts(tmp_path / "a.parquet")[0].task.payload == {}


def test_a_greedy_baseline_follows_its_group_and_takes_no_advantage(varied, tmp_path):
    write_rollouts(tmp_path / "a.parquet", 1, varied, batch_of(varied, [1.0, 2.0, 3.0, 4.0]))
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["greedy"] for row in rows] == [False] * 3 + [True, False, True, False]
    assert [row["advantage"] for row in rows] == [1.0, None, 0.0, None, 3.0, None, 4.0]
    assert [row["group"] for row in rows] == [0, 0, 0, 0, 1, 1, 2]


def test_a_file_says_where_it_is_from_if_it_was_told(groups, tmp_path):
    origin = Origin("0.1", "org/ü", "m", "t", 8)
    write_rollouts(tmp_path / "a.parquet", 9, groups, origin=origin)
    write_rollouts(tmp_path / "b.parquet", 9, groups)
    assert read_origin(tmp_path / "a.parquet") == origin and read_origin(tmp_path / "b.parquet") is None


def test_what_cannot_be_read(groups, tmp_path):
    path = tmp_path / "a.parquet"
    write_rollouts(path, 1, groups)
    pq.write_table(pq.read_table(path).drop_columns(["turns", "budget"]), path)
    with pytest.raises(ReplayError, match="lack the columns turns, budget") as caught:
        read_rollouts(path)
    assert "earlier rollcli" in caught.value.hint
    path.write_bytes(path.read_bytes()[:100])
    for read in (read_rollouts, read_origin):
        with pytest.raises(ReplayError, match="cannot be read"):
            read(path)


def test_of_an_image_its_path_is_kept_or_its_digest(groups, tmp_path):
    pictures = [{"type": "image", "image": image} for image in ("a.png", b"png")]
    content = [*pictures, {"type": "text", "text": "why?"}]
    groups[1].task.messages[:] = [{"role": "user", "content": content}]
    write_rollouts(tmp_path / "step.parquet", 1, groups)
    row = pq.read_table(tmp_path / "step.parquet").to_pylist()[-1]
    path, raw, text = json.loads(row["messages"])[0]["content"]
    assert path == content[0] and text == content[2] and row["prompt"] == "<image><image>why?"
    assert raw["image"].keys() == {"sha256", "size"}
