"""A checkpoint counts when it is whole, and only then; whatever happens while one is written, the others stand."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest

from rollcli.checkpoints import store
from rollcli.checkpoints.store import fault_of, newest_whole, prune, read_state, writing
from rollcli.errors import CheckpointError
from rollcli.runs.directory import COMPLETE, list_checkpoints


def save(folder, step, content=b"weights", **state):
    with writing(folder, step, {"step": step, **state}) as beside:
        (beside / "model").mkdir()
        (beside / "model" / "model.safetensors").write_bytes(content)
        (beside / "optimizer.safetensors").write_bytes(content * 3)
    return folder / f"step_{step:06d}"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_back(tmp_path):
    path = save(tmp_path / "checkpoints", 3, cursor={"a": {"drawn": 7}})
    assert newest_whole(tmp_path / "checkpoints") == (3, path, [])
    assert read_state(path) == {"step": 3, "cursor": {"a": {"drawn": 7}}}
    facts = json.loads((path / COMPLETE).read_text())
    digest = hashlib.sha256(b"weights").hexdigest()
    assert facts["model/model.safetensors"] == {"bytes": 7, "sha256": digest}
    assert set(facts) == {"model/model.safetensors", "optimizer.safetensors", "state.json"}
    assert names(tmp_path / "checkpoints") == ["step_000003"]


def test_the_newest_is_found_by_number(tmp_path):
    for step in (100, 20, 1_000_000):
        save(tmp_path, step)
    assert newest_whole(tmp_path)[0] == 1_000_000
    assert newest_whole(tmp_path, 20)[0] == 20


@pytest.mark.parametrize("there", [False, True])
def test_no_checkpoint_at_all(tmp_path, there):
    folder = tmp_path / "checkpoints"
    if there:
        folder.mkdir()
    assert newest_whole(folder) is None
    with pytest.raises(CheckpointError, match="checkpoint of step 4 is not there") as caught:
        newest_whole(folder, 4)
    assert caught.value.hint == "there are: none"


DAMAGE = {
    "a byte flipped": lambda path: (path / "model" / "model.safetensors").write_bytes(b"weighty"),
    "cut off": lambda path: (path / "optimizer.safetensors").write_bytes(b"weights"),
    "emptied": lambda path: (path / "state.json").write_bytes(b""),
    "a file gone": lambda path: (path / "optimizer.safetensors").unlink(),
    "a folder gone": lambda path: shutil.rmtree(path / "model"),
    "no marker": lambda path: (path / COMPLETE).unlink(),
    "an empty marker": lambda path: (path / COMPLETE).write_text(""),
    "a marker of nothing": lambda path: (path / COMPLETE).write_text("{}"),
    "a marker of null": lambda path: (path / COMPLETE).write_text("null"),
    "a marker without sizes": lambda path: (path / COMPLETE).write_text('{"state.json": 3}'),
    "a marker that is no text": lambda path: (path / COMPLETE).write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_word(tmp_path, damage):
    whole = save(tmp_path, 3)
    damage(save(tmp_path, 6))
    step, path, skipped = newest_whole(tmp_path)
    assert (step, path) == (3, whole)
    assert len(skipped) == 1 and skipped[0].startswith("checkpoint of step 6 is ") and "passed over" in skipped[0]
    with pytest.raises(CheckpointError, match="checkpoint of step 6 is ") as caught:
        newest_whole(tmp_path, 6)
    assert caught.value.hint == "there are: 3"


def test_what_is_wrong_is_named(tmp_path):
    path = save(tmp_path, 1)
    assert fault_of(path) is None
    (path / "optimizer.safetensors").write_bytes(b"WEIGHTS" * 3)
    assert fault_of(path) == "damaged (`optimizer.safetensors` has changed)"
    (path / "optimizer.safetensors").unlink()
    assert fault_of(path) == "damaged (`optimizer.safetensors` is missing)"
    (path / COMPLETE).unlink()
    assert fault_of(path) == "unfinished"
    assert fault_of(tmp_path / "step_000009") == "not there"


def test_only_newer_ones_are_said_to_be_passed_over(tmp_path):
    (tmp_path / "step_000001").mkdir()  # an old one whose deletion was cut off
    save(tmp_path, 3)
    assert newest_whole(tmp_path)[2] == []


def test_all_damaged(tmp_path):
    (save(tmp_path, 3) / "state.json").unlink()
    assert newest_whole(tmp_path) is None


# Writing that fails


@pytest.mark.parametrize("error", [RuntimeError("engine"), KeyboardInterrupt()])
def test_what_ends_the_writing_goes_through_and_leaves_nothing(tmp_path, error):
    save(tmp_path, 3)
    with pytest.raises(type(error)), writing(tmp_path, 4, {}) as beside:
        (beside / "a").write_text("x")
        raise error
    assert names(tmp_path) == ["step_000003"] and newest_whole(tmp_path)[0] == 3


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        # What safetensors and Ray make of it.
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("ray::save()\n  File x\nOSError: [Errno 28] No space left on device: 'a'\n"),
    ],
)
def test_a_full_disk_is_told_as_such_and_earlier_ones_stand(tmp_path, error):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 6 cannot be written .*: no space left") as caught:
        with writing(tmp_path, 6, {}) as beside:
            (beside / "a").write_text("x")
            raise error
    assert "ROLL_RUNS" in caught.value.hint and "earlier checkpoints are untouched" in caught.value.hint
    assert names(tmp_path) == ["step_000003"] and newest_whole(tmp_path)[0] == 3


def test_another_failure_of_the_disk_gives_its_reason(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be written to .*: \[Errno 5\] Input/output error"):
        with writing(tmp_path, 6, {}):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_the_last_write_fails(tmp_path, monkeypatch):
    save(tmp_path, 3)

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "_flush", full)
    with pytest.raises(CheckpointError, match="no space left"):
        save(tmp_path, 3, b"other")
    monkeypatch.undo()
    assert newest_whole(tmp_path) == (3, tmp_path / "step_000003", [])
    assert (tmp_path / "step_000003" / "model" / "model.safetensors").read_bytes() == b"weights"


def test_no_folder_can_be_made(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "checkpoints", 1)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk):
    save(small_disk, 1, b"x" * 50_000)
    for step in (2, 3):
        with pytest.raises(CheckpointError, match="no space left"):
            save(small_disk, step, b"x" * 300_000)
    assert names(small_disk) == ["step_000001"] and newest_whole(small_disk)[0] == 1
    save(small_disk, 4, b"x" * 50_000)
    assert newest_whole(small_disk)[0] == 4


# Writing that is cut off


def test_a_step_that_is_written_again_takes_the_place_of_the_old(tmp_path):
    save(tmp_path, 3, b"old")
    path = save(tmp_path, 3, b"new")
    assert (path / "model" / "model.safetensors").read_bytes() == b"new"
    assert names(tmp_path) == ["step_000003"]


def test_an_exchange_that_was_cut_off_is_undone(tmp_path):
    path = save(tmp_path, 3, b"old")
    path.rename(tmp_path / "step_000003.old")
    (tmp_path / "step_000003.tmp").mkdir()
    assert newest_whole(tmp_path) == (3, path, [])
    assert (path / "model" / "model.safetensors").read_bytes() == b"old"


def test_an_exchange_that_was_cut_off_before_its_end_is_ended(tmp_path):
    path = save(tmp_path, 3, b"new")
    shutil.copytree(path, tmp_path / "step_000003.old")
    assert newest_whole(tmp_path) == (3, path, [])
    assert names(tmp_path) == ["step_000003"]


def test_what_killed_writers_left_is_cleared(tmp_path):
    for step in (3, 5):
        (tmp_path / f"step_{step:06d}.tmp").mkdir()
        (tmp_path / f"step_{step:06d}.tmp" / "half").write_text("x")
    save(tmp_path, 4)
    assert names(tmp_path) == ["step_000004"]


WRITER = """
import sys, itertools
from pathlib import Path
from rollcli.checkpoints.store import prune, writing

folder = Path(sys.argv[1])
print("ready", flush=True)
for step in itertools.count(int(sys.argv[2])):
    for again in range(2):
        with writing(folder, step, {"step": step}) as beside:
            (beside / "model").mkdir()
            for part in range(4):
                (beside / "model" / f"part{part}").write_bytes(bytes([step % 256]) * 20_000)
        print(step, flush=True)
    prune(folder, keep_last=2, keep_every=0)
"""


def test_killed_at_any_moment_the_newest_whole_one_still_loads(tmp_path):
    folder = tmp_path / "checkpoints"
    draw = random.Random(3)
    said = 0
    for _ in range(20):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(said + 1)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout.readline() == "ready\n"
        for _ in range(draw.randrange(4)):
            said = int(writer.stdout.readline())
        # Past the last word it is somewhere inside the next one: how far is up to this many turns of a loop.
        for _ in range(draw.randrange(400_000)):
            pass
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait()
        said = int(rest[-1]) if rest and rest[-1].isdigit() else said
        found = newest_whole(folder)
        assert (found is None) == (said == 0) or found[0] == said + 1
        if found is None:
            continue
        step, path, skipped = found
        assert step in (said, said + 1) and skipped == []
        assert read_state(path) == {"step": step}
        parts = [(path / "model" / f"part{part}").read_bytes() for part in range(4)]
        assert parts == [bytes([step % 256]) * 20_000] * 4
        said = step
    assert said > 5


# Pruning


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (1, 0, [60]),
        (2, 0, [50, 60]),
        (9, 0, [10, 20, 30, 40, 50, 60]),
        (1, 20, [20, 40, 60]),
        (2, 30, [30, 50, 60]),
        (1, 7, [60]),
    ],
)
def test_which_are_kept(tmp_path, keep_last, keep_every, left):
    for step in range(10, 70, 10):
        save(tmp_path, step)
    assert prune(tmp_path, keep_last, keep_every) == []
    assert list_checkpoints(tmp_path) == left
    assert len(names(tmp_path)) == len(left)


def test_one_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step)
    delete = shutil.rmtree

    def refuse(path, *arguments, **options):
        if path.name == "step_000001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        delete(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    (warning,) = prune(tmp_path, 1, 0)
    assert "step_000001" in warning and "busy" in warning.lower()
    # What is half deleted does not count, and nothing else was held up.
    assert list_checkpoints(tmp_path) == [3] and newest_whole(tmp_path)[0] == 3


def test_nothing_to_prune(tmp_path):
    assert prune(tmp_path / "gone", 2, 0) == []
