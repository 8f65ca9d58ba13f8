"""What a reward is: a plain function that names what it wants, and gives back one number.

    def score(response: str, answer: str) -> float:
        return float(answer in response)

Fields are injected by name. Every sample has

    prompt    text the model was given
    response  text the model gave, special tokens removed
    messages  the chat up to the response

and every column of its task's payload, such as `answer`; what the recipe's `args` say comes before a column of that
name. A reward with `per_turn: true` has `turn` too, its number from 0. A parameter with a default is optional;
`**fields` takes all that is left. What comes back is checked here, so that nothing but a finite number ever reaches an
advantage.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from rollcli.errors import PluginError, RewardError
from rollcli.suggest import did_you_mean

Reward = Callable[..., Any]

STANDARD_FIELDS = ("prompt", "response", "messages")
"""Fields every sample has, whatever its task."""


@dataclass(frozen=True)
class RewardResult:
    """A score with details.

    Attributes:
        score: what is weighted and summed into the trajectory's reward.
        metrics: numbers worth averaging over a batch.
        accuracy: the task's own notion of success in [0, 1], unshaped; None leaves it to the score.
    """

    score: float
    metrics: dict[str, float] = field(default_factory=dict)
    accuracy: float | None = None


@dataclass(frozen=True)
class _Wanted:
    """The fields a function asks for: all it accepts, those without a default; `everything` with `**fields`."""

    accepted: frozenset[str]
    required: tuple[str, ...]
    everything: bool
    bound: frozenset[str]

    def takes(self, field_name: str) -> bool:
        """True when the field is to be passed."""
        return field_name in self.accepted or (self.everything and field_name not in self.bound)


def reward_name(function: Reward) -> str:
    """Returns what to call a reward in messages; partials are named by what they wrap, objects by their class."""
    if isinstance(function, partial):
        return reward_name(function.func)
    return getattr(function, "__name__", None) or type(function).__name__


def call_reward(function: Reward, fields: Mapping[str, Any]) -> RewardResult:
    """Calls a reward with the fields it asks for and checks what comes back.

    Raises:
        RewardError: an argument no field answers to, an async function, or a result that is not one finite number.
        Exception: whatever the function itself raises, untouched.
    """
    name = reward_name(function)
    wanted = _wanted(function)
    missing = _missing(name, wanted, fields)
    if missing:
        raise RewardError(missing, hint="rename the argument, give it a default, or add the column to the task")
    return to_result(function(**{key: value for key, value in fields.items() if wanted.takes(key)}), name)


def check_signature(function: Reward, known_fields: Iterable[str]) -> None:
    """Checks before a run that every sample can answer what a reward asks for.

    Args:
        known_fields: names of all fields a sample of the task has; see `STANDARD_FIELDS`.

    Raises:
        PluginError: the function is async, takes arguments by position only, or asks for a field no sample has.
    """
    try:
        missing = _missing(reward_name(function), _wanted(function), known_fields)
    except RewardError as error:
        raise PluginError(error.message, error.hint) from error
    if missing:
        raise PluginError(missing, hint="rename the argument, give it a default, or add the column to the task")


def argument_problem(function: Reward, args: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns which of the values that a recipe passes to a reward by name is wrong, and why; None when none is.

    Raises:
        PluginError: as `check_signature`.
    """
    try:
        wanted = _wanted(function)
    except RewardError as error:
        raise PluginError(error.message, error.hint) from error
    for argument in args:
        if argument in STANDARD_FIELDS:
            return argument, "is what the sample says, which no recipe can"
        if not wanted.takes(argument):
            known = sorted(wanted.accepted - {*STANDARD_FIELDS})
            meant = did_you_mean(argument, known)
            listed = f"; it takes {', '.join(known)}" if known else "; it takes none"
            told = f" (did you mean `{meant}`?)" if meant else listed
            return argument, f"reward `{reward_name(function)}` takes no `{argument}`{told}"
    return None


def to_result(value: Any, name: str) -> RewardResult:
    """Returns what a reward gave back as a `RewardResult` of plain floats.

    Raises:
        RewardError: naming the reward `name`, what was expected and what came.
    """
    if not isinstance(value, RewardResult):
        return RewardResult(_number(value, f"reward `{name}`"))
    if not isinstance(value.metrics, Mapping):
        raise RewardError(f"reward `{name}`, metrics: expected numbers by name, got {_shown(value.metrics)}")
    metrics = {str(key): _number(item, f"reward `{name}`, metric `{key}`") for key, item in value.metrics.items()}
    accuracy = value.accuracy
    if accuracy is not None:
        accuracy = _number(accuracy, f"reward `{name}`, accuracy")
        if not 0 <= accuracy <= 1:
            raise RewardError(f"reward `{name}`, accuracy: expected a number from 0 to 1, got {accuracy:g}")
    return RewardResult(_number(value.score, f"reward `{name}`"), metrics, accuracy)


def _wanted(function: Reward) -> _Wanted:
    try:
        return _inspected(function)
    except TypeError:  # a callable object may be unhashable, and is then inspected each time
        return _inspected.__wrapped__(function)


@lru_cache(maxsize=256)
def _inspected(function: Reward) -> _Wanted:
    name = reward_name(function)
    if not callable(function):
        raise RewardError(f"reward is not a function: {_shown(function)}")
    called = function.func if isinstance(function, partial) else function
    if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None)):  # noqa: B004
        raise RewardError(f"reward `{name}` is async", hint="write it as a plain function; it runs in its own process")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise RewardError(f"reward `{name}` does not say what it takes", hint="wrap it in a plain function") from error
    # What a partial has bound by keyword is settled, even if a field of that name exists.
    bound = set(function.keywords) if isinstance(function, partial) else set()
    accepted, required, everything = set(), [], False
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"reward `{name}` takes `{parameter.name}` by position only",
                hint="fields are injected by name; remove the `/` from its signature",
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            everything = True
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name not in bound:
            accepted.add(parameter.name)
            if parameter.default is parameter.empty:
                required.append(parameter.name)
    return _Wanted(frozenset(accepted), tuple(required), everything, frozenset(bound))


def _missing(name: str, wanted: _Wanted, fields: Iterable[str]) -> str | None:
    known = set(fields)
    argument = next((argument for argument in wanted.required if argument not in known), None)
    if argument is None:
        return None
    meant = did_you_mean(argument, sorted(known))
    return (
        f"reward `{name}` asks for `{argument}`, which no sample has"
        + (f" (did you mean `{meant}`?)" if meant else "")
        + f"; fields: {', '.join(sorted(known)) or 'none'}"
    )


def _number(value: Any, what: str) -> float:
    # NumPy and torch scalars are known by their shape, so that neither library is imported to score a string.
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{what}: expected one number, got {_shown(value)}", hint="return a float, one per sample")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{what}: expected a finite number, got {number}", hint="return a finite float")
    return number


def _shown(value: Any) -> str:
    """Says what a value is in at most about 80 characters, whatever its size."""
    if inspect.isawaitable(value):
        getattr(value, "close", lambda: None)()
        return "something to await; async rewards are not supported"
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, (list, tuple, dict, set)):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value[:60] if isinstance(value, (str, bytes)) else value)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"
