"""The tree of errors: what one catches for each, what it shows, and that it survives the way between processes."""

import pickle

import pytest

from rollcli import errors
from rollcli.errors import ConfigError, Interrupted, Problem, RollError

STANDARD = {
    "ConfigError": ValueError,
    "RecipeNotFound": LookupError,
    "RunNotFound": LookupError,
    "ModelNotFound": LookupError,
    "DatasetNotFound": LookupError,
    "RunExists": FileExistsError,
    "PluginError": ImportError,
    "PlanError": ValueError,
    "EngineError": RuntimeError,
    "WeightSyncError": RuntimeError,
    "WorkerDied": RuntimeError,
    "RolloutError": RuntimeError,
    "EpisodeError": RuntimeError,
    "RewardError": RuntimeError,
    "CheckpointError": OSError,
    "Interrupted": RuntimeError,
}


@pytest.mark.parametrize(("name", "standard"), STANDARD.items(), ids=STANDARD)
def test_each_leaf_is_also_the_standard_class_and_survives_pickling(name, standard):
    error = getattr(errors, name)("what failed", "what to do")
    assert isinstance(error, RollError) and isinstance(error, standard)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.message, again.hint) == ("what failed", "what failed", "what to do")


def test_the_docstring_shows_every_class():
    classes = [name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, RollError)]
    assert all(f" {name} " in errors.__doc__ or name == "RollError" for name in classes if name not in errors.__doc__)
    assert all(name in errors.__doc__ for name in classes)


def test_config_error_keeps_its_problems_through_pickling():
    problems = [Problem("unknown key `a`", "r.yaml", 3, 5, "    a: 1", 1, "b"), Problem("`steps`: is required")]
    again = pickle.loads(pickle.dumps(ConfigError(problems, "try")))
    assert again.problems == problems and again.hint == "try"
    assert str(again) == "r.yaml:3:5: unknown key `a` (did you mean `b`?)\n`steps`: is required"


def test_config_error_takes_a_plain_sentence():
    assert ConfigError("no room").problems == [Problem("no room")]


def test_interrupted_keeps_its_exit_code():
    again = pickle.loads(pickle.dumps(Interrupted("stopped", "resume it", 143)))
    assert (again.exit_code, again.hint) == (143, "resume it")
    assert Interrupted("stopped").exit_code == 130


@pytest.mark.parametrize(
    ("problem", "location"),
    [
        (Problem("m", "a/b.yaml", 2, 7), "a/b.yaml:2:7"),
        (Problem("m", "command line", 3, 1), "command line, override 3"),
        (Problem("m", "a.yaml"), "a.yaml"),
        (Problem("m"), ""),
    ],
)
def test_locations(problem, location):
    assert problem.location == location
    assert str(problem) == (f"{location}: m" if location else "m")
