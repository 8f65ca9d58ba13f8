"""What a failed call is shown as; deaths of real actors are in test_mailbox.py and test_cluster.py."""

import ray

from rollcli.cluster.death import understood
from rollcli.errors import EngineError, WorkerDied


class Actor:
    """Has an id as Ray's handles do."""

    def __init__(self, number: str):
        self._actor_id = bytes.fromhex(number)


def task_error(cause: Exception) -> Exception:
    return ray.exceptions.RayTaskError("f", "Traceback …", cause)


def test_own_error_of_a_worker_is_shown_as_raised():
    cause = EngineError("no memory", hint="use less")
    assert understood(task_error(cause), {}) is cause


def test_foreign_error_keeps_the_remote_traceback():
    error = task_error(ValueError("x"))
    assert understood(error, {}) is error
    local = TypeError("cannot be sent")
    assert understood(local, {}) is local


def test_death_is_named_by_the_actor():
    error = ray.exceptions.ActorDiedError()
    error.actor_id = "0b"
    died = understood(error, {"rollout-0": Actor("0a"), "rollout-1": Actor("0b")})
    assert isinstance(died, WorkerDied) and "`rollout-1` died" in died.message
    assert "logs/latest/rollout-1.log" in died.hint


def test_failed_start_says_why():
    error = ray.exceptions.ActorDiedError()
    error.actor_id = "0a"
    error.error_msg = (
        "died because of an error raised in its creation task, …\n  File …\nrollcli.errors.EngineError: no x"
    )
    died = understood(error, {"policy-0": Actor("0a")})
    assert died.message == "worker `policy-0` did not start: EngineError: no x"
    # Nobody is to be replaced, and a second attempt would end in the same way.
    assert died.worker == ""


def test_death_knows_the_worker_and_its_exit_code():
    error = ray.exceptions.ActorDiedError()
    error.actor_id, error.error_msg = "0a", "The actor exited … Worker exits with an exit code 3."
    died = understood(error, {"policy-0": Actor("0a")})
    assert (died.worker, died.exit_code, died.silent) == ("policy-0", 3, False)
    error.error_msg = "The actor is dead because its worker process has died."
    died = understood(error, {"policy-1": Actor("0c")})
    assert (died.worker, died.exit_code) == ("of another role", None)
