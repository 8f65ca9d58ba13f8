"""What was seen and what was sampled, written down token by token."""

import numpy as np

from rollcli.data.carriers import Task
from rollcli.engines.base import Completion
from rollcli.rollout.recorder import TrajectoryRecorder


def completion(tokens, versions):
    logprobs = -np.array(tokens, dtype=np.float32) / 10
    return Completion("x", np.array(tokens, np.int32), logprobs, np.array(versions, np.int32), "stop")


def test_two_turns_with_an_observation_between():
    recorder = TrajectoryRecorder(Task("t", 3, []), sample=5)
    recorder.observe(np.array([1, 2, 3]))
    recorder.take(completion([4, 5], [7, 7]))
    recorder.observe(np.array([6], dtype=np.int64))
    assert recorder.tokens.tolist() == [1, 2, 3, 4, 5, 6] and recorder.tokens.dtype == np.int32
    recorder.take(completion([8], [9]))
    done = recorder.trajectory("stop", "prompt", "response")
    assert done.tokens.tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert done.loss_mask.tolist() == [False, False, False, True, True, False, True]
    np.testing.assert_allclose(done.logprobs, [0, 0, 0, -0.4, -0.5, 0, -0.8], rtol=1e-6)
    assert done.versions.tolist() == [-1, -1, -1, 7, 7, -1, 9]
    assert done.turns == [(3, 5), (6, 7)]
    assert (recorder.length, recorder.sampled_length, done.response_tokens) == (7, 3, 3)
    assert (done.task_id, done.sample, done.stop_reason) == ("t/3", 5, "stop")
    assert (done.prompt_text, done.response_text) == ("prompt", "response")
    types = [column.dtype for column in (done.tokens, done.loss_mask, done.logprobs, done.versions)]
    assert types == [np.int32, np.bool_, np.float32, np.int32]


def test_empty_and_without_a_token():
    recorder = TrajectoryRecorder(Task("t", 0, []), 0)
    empty = recorder.trajectory("error", "", "")
    assert len(empty.tokens) == len(empty.loss_mask) == len(empty.logprobs) == len(empty.versions) == 0
    recorder.observe(np.array([1]))
    recorder.take(completion([], []))
    assert recorder.trajectory("length", "", "").turns == [(1, 1)]


def test_a_trajectory_does_not_change_afterwards():
    recorder = TrajectoryRecorder(Task("t", 0, []), 0)
    recorder.take(completion([1], [0]))
    done = recorder.trajectory("stop", "", "")
    recorder.take(completion([2], [0]))
    assert done.tokens.tolist() == [1] and done.turns == [(0, 1)]


def test_what_it_ends_with() -> None:
    recorder = TrajectoryRecorder(Task("t", 0, []), 0)
    assert not recorder.ends_with((3,))
    recorder.observe(np.array([1, 3]))
    assert recorder.ends_with((2, 3)) and not recorder.ends_with((1,))
    recorder.observe(np.zeros(0, np.int32))
    assert not recorder.ends_with((0, 3))
