"""One episode against doubles: what the model sampled is trained as sampled, and whatever goes wrong is data."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollcli.config.schema import RewardConfig, TaskConfig
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group, Trajectory
from rollcli.data.stream import derive_seed
from rollcli.engines.base import Completion, SamplingParams
from rollcli.environments.base import StepResult
from rollcli.errors import EngineError, EpisodeError, ImageError, OutOfTokens, RewardError, WorkerDied
from rollcli.pipelines.metrics import of_rollout
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import IsolatedCaller, RewardFailure
from rollcli.rollout import episode as module
from rollcli.rollout.conversation import EpisodeContext
from rollcli.rollout.episode import Episode, apply_scores
from rollcli.rollout.states import Census, State
from tests.rollout.doubles import Format, Model, task

LIMIT_S = 30
closed: list[str] = []


@dataclass
class World:
    """Answers `seen`, three turns long, unless told to misbehave."""

    turns: int = 3
    fault: str = ""

    def __post_init__(self) -> None:
        self.step_number = 0
        if self.fault == "construct":
            raise ValueError("no such option")

    async def reset(self, task: Any) -> list[dict]:
        await self._misbehave("reset")
        if self.fault == "reset returns nothing":
            return None
        return task.messages

    async def step(self, response: str) -> StepResult:
        await self._misbehave("step")
        self.step_number += 1
        if self.fault == "step returns a tuple":
            return ("observation", 1.0, True)
        if self.fault == "reward NaN":
            return StepResult(done=True, reward=float("nan"))
        if self.fault == "metric text":
            return StepResult(done=True, metrics={"moves": "many"})
        if self.fault == "unpicklable":
            return StepResult(done=True, fields={"board": lambda: 0})
        if self.fault == "message without content":
            return StepResult([{"role": "user"}])
        done = self.step_number == self.turns
        messages = [] if done else [{"role": "user", "content": f"seen{self.step_number}"}]
        return StepResult(messages, done, self.step_number / 4, {"board": response}, {"moves": self.step_number})

    async def close(self) -> None:
        closed.append(self.fault)
        await self._misbehave("close")

    async def _misbehave(self, method: str) -> None:
        if self.fault == f"{method} raises":
            raise KeyError(f"in {method}")
        if self.fault == f"{method} times out itself":
            raise TimeoutError("read timed out")
        if self.fault == f"{method} exits":
            raise SystemExit(3)
        if self.fault == f"{method} cancels itself":
            raise asyncio.CancelledError
        if self.fault == f"{method} hangs" or (self.fault == "step and close hang" and method != "reset"):
            await asyncio.Event().wait()


async def no_scores(config: TaskConfig, fields: dict) -> list:
    return [RewardResult(1.0, {"length": 3.0}) for _ in config.rewards]


def play(world: World, generate: Any, score: Any = no_scores, rewards: tuple = ("good",), **changes: Any) -> Any:
    """Plays an episode; returns its trajectory, and the census."""
    config = TaskConfig("t", None, [RewardConfig(name) for name in rewards], world)
    context = {
        "config": config, "format": Format(), "sampling": SamplingParams(max_tokens=100, temperature=0.7),
        "max_prompt_tokens": 50, "max_context": 1000, "timeout_s": 20.0, "generate": generate, "score": score,
        "census": Census(), **changes,
    }  # fmt: skip
    closed.clear()

    async def main() -> Any:
        [only] = await asyncio.wait_for(Episode(task(4), 2, EpisodeContext(**context)).run(), LIMIT_S)
        return only

    try:
        return asyncio.run(main())
    finally:
        play.census = context["census"]


def test_three_turns_are_trained_exactly_where_sampled():
    model = Model("ab.", "c.", "def.", version=5)
    done = play(World(), model)
    text = "question 4>ab.seen1>c.seen2>def."
    assert "".join(map(chr, done.tokens)) == text
    expected = [False] * len(text)
    for start, end in ((11, 14), (20, 22), (28, 32)):
        expected[start:end] = [True] * (end - start)
    assert done.loss_mask.tolist() == expected
    assert done.turns == [(11, 14), (20, 22), (28, 32)]
    assert done.versions[done.loss_mask].tolist() == [5, 5, 5, 6, 6, 7, 7, 7, 7]
    assert set(done.versions[~done.loss_mask]) == {-1}
    assert done.logprobs[done.loss_mask].tolist() == [-0.25, -0.5, -0.75, -0.25, -0.5, -0.25, -0.5, -0.75, -1.0]
    assert not done.logprobs[~done.loss_mask].any()
    assert (done.stop_reason, done.usable, closed) == ("stop", True, [""])


def test_each_turn_is_asked_with_everything_so_far_and_what_is_left_of_the_budget():
    model = Model("ab.", "c.", "def.")
    play(World(), model)
    prompts = ["".join(map(chr, request.prompt)) for request in model.requests]
    assert prompts == ["question 4>", "question 4>ab.seen1>", "question 4>ab.seen1>c.seen2>"]
    assert [request.sampling.max_tokens for request in model.requests] == [100, 97, 95]
    assert [request.seed for request in model.requests] == [derive_seed(1004, 2, turn) for turn in range(3)]
    assert all(r.sampling.stop_token_ids == (ord("."),) and r.sampling.temperature == 0.7 for r in model.requests)
    assert len({request.id for request in model.requests}) == 3


class Counter:
    """No dataclass: what one episode leaves on it must not be seen by the next."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def reset(self, task: Any) -> list[dict]:
        return task.messages

    async def step(self, response: str) -> StepResult:
        self.seen.append(response)
        return StepResult(done=True, reward=float(len(self.seen)))

    async def close(self) -> None: ...


def test_an_environment_of_any_class_is_the_episodes_own():
    world = Counter()
    assert [play(world, Model("ab.")).turn_rewards for _ in range(2)] == [[1.0], [1.0]] and world.seen == []


def test_rewards_of_turns_and_functions_add_up():
    asked: list[dict] = []

    async def score(config: TaskConfig, fields: dict) -> list:
        asked.append(fields)
        return [RewardResult(0.5, {"length": 3.0}, accuracy=1.0), RewardResult(2.0)]

    done = play(World(), Model("ab.", "c.", "def."), score, rewards=("good", "short"))
    assert done.turn_rewards == [0.25, 0.5, 0.75]
    assert done.reward == pytest.approx(1.5 + 0.5 + 2.0) and done.rewards == {"good": 0.5, "short": 2.0}
    assert done.accuracy == 1.0 and done.metrics == {"moves": 3.0, "good/length": 3.0}
    (fields,) = asked
    assert (fields["response"], fields["board"]) == ("def", "def")
    assert fields["prompt"] == "question 4\nseen1\nseen2"
    assert [m["role"] for m in fields["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert done.response_text == "ab\nc\ndef"


def test_a_trajectory_knows_its_budget_and_the_state_of_each_turn():
    done = play(World(), Model("ab.", "c.", "def."), sampling=SamplingParams(max_tokens=60))
    assert done.budget == 60
    # The text of what the model last saw, where the environment has no word of its own.
    assert done.state_keys == ["question 4", "seen1", "seen2"]


@dataclass
class Board(World):
    """Says itself which state it is in."""

    def state_key(self) -> str:
        if self.fault == "state_key raises":
            raise KeyError("no board")
        return f"board {self.step_number % 2}" if self.fault != "number" else 7 + self.step_number


def test_an_environment_may_name_its_states():
    assert play(Board(), Model("ab.", "c.", "def.")).state_keys == ["board 0", "board 1", "board 0"]
    assert play(Board(fault="number"), Model("ab.", "c.", "def.")).state_keys == ["7", "8", "9"]


def test_a_state_that_cannot_be_named_fails_the_episode():
    done = play(Board(fault="state_key raises"), Model("ab.", "c."))
    assert (done.error_kind, done.error, closed) == ("environment", "KeyError: 'no board'", ["state_key raises"])


def test_equal_states_are_equal_in_a_batch():
    done = play(Board(), Model("ab.", "c.", "def."))
    states = Batch.from_groups([Group(task(4), [done])]).tokens["states"]
    first, second, third = ({*states[start:end]} for start, end in done.turns)
    assert first == third != second and len(first) == len(second) == 1
    assert set(states[~done.loss_mask]) == {-1}


@pytest.mark.parametrize(("budget", "texts", "turns"), [(3, ["ab.", "c."], 1), (4, ["ab.", "cd."], 2)])
def test_budget_holds_over_turns(budget, texts, turns):
    done = play(World(), Model(*texts), sampling=SamplingParams(max_tokens=budget))
    assert done.response_tokens <= budget and len(done.turns) == turns and done.usable
    assert done.stop_reason == ("stop" if budget == 3 else "length")


def test_turn_cut_off_in_the_middle_ends_the_episode():
    done = play(World(), Model("abcdefghij."), sampling=SamplingParams(max_tokens=5))
    assert (done.stop_reason, done.response_text, done.response_tokens) == ("length", "abcde", 5)
    assert len(done.turn_rewards) == 1 and done.usable


def test_context_that_is_full_ends_the_episode_as_length():
    # 11 + 3 + 6 tokens leave nothing of a context of 20 for a second turn.
    done = play(World(), Model("ab."), max_context=20, sampling=SamplingParams(9))
    assert (done.stop_reason, done.usable, "".join(map(chr, done.tokens))) == ("length", True, "question 4>ab.")
    assert play(World(), Model("ab.", "c."), max_context=23, sampling=SamplingParams(12)).stop_reason == "length"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("construct", "ValueError: no such option"),
        ("reset raises", "KeyError: 'in reset'"),
        ("step raises", "KeyError: 'in step'"),
        ("close raises", "KeyError: 'in close'"),
        ("reset times out itself", "TimeoutError: read timed out"),
        ("step exits", "SystemExit: 3"),
        ("step cancels itself", "CancelledError"),
        ("reset returns nothing", "TypeError"),
        ("step returns a tuple", "`step` returned tuple, not a StepResult"),
        ("reward NaN", "finite number, got nan"),
        ("metric text", "metric `moves`"),
        ("unpicklable", "pickle"),
        ("message without content", "KeyError: 'content'"),
    ],
)
def test_whatever_an_environment_does_wrong_fails_its_episode(fault, message):
    world = World()
    world.fault = fault  # the episode's own copy is made later, and that is where `construct` fails
    done = play(world, Model("ab.", "c.", "def."))
    assert done.error_kind == "environment" and message in done.error and not done.usable
    assert done.stop_reason == "error" and closed == ([] if fault == "construct" else [fault])
    assert play.census.counts == {**play.census.counts, State.FAILED: 1} and play.census.snapshot() == {}


@pytest.mark.parametrize("method", ["reset", "step"])
def test_hanging_environment_times_out_and_is_closed(method):
    done = play(World(fault=f"{method} hangs"), Model("ab."), timeout_s=0.1)
    assert (done.error_kind, done.error) == ("timeout", "episode took longer than 0.1 s")
    assert closed == [f"{method} hangs"]
    assert done.response_text == ("ab" if method == "step" else "")


def test_close_that_hangs_too_has_a_limit_of_its_own(monkeypatch):
    monkeypatch.setattr(module, "CLOSE_LIMIT_S", 0.1)
    assert play(World(fault="step and close hang"), Model("ab."), timeout_s=0.1).error_kind == "timeout"
    done = play(World(fault="close hangs"), Model("ab.", "c.", "def."))
    assert (done.error_kind, done.error) == ("environment", "`close` took longer than 0.1 s")


def test_prompt_that_is_too_long_is_counted_not_cut():
    done = play(World(), Model("ab."), max_prompt_tokens=10)
    assert (done.error_kind, done.error) == ("prompt_too_long", "prompt has 11 tokens, 10 are allowed")
    assert closed == [""]
    assert play(World(turns=1), Model("ab."), max_prompt_tokens=11).usable


def test_template_that_rewrites_turns_fails_the_episode():
    class Rewriting(Format):
        def between(self, messages: list, observed: list) -> np.ndarray:
            raise EpisodeError("the chat template rewrites earlier turns when the chat goes on")

    done = play(World(), Model("ab.", "c."), format=Rewriting())
    assert done.error_kind == "environment" and "rewrites" in done.error


def test_answer_the_engine_refuses_fails_the_episode():
    async def refuse(request: Any) -> Completion:
        return Completion(request.id, *[np.zeros(0)] * 3, "error", "the logits are NaN")

    done = play(World(), refuse)
    assert (done.error_kind, done.error, closed) == ("engine", "the logits are NaN", [""])


@pytest.mark.parametrize("error", [WorkerDied("rollout-0 died"), EngineError("the engine failed")])
def test_death_of_what_it_needs_is_the_runs_business(error):
    async def die(request: Any) -> Completion:
        raise error

    with pytest.raises(type(error)):
        play(World(), die)
    assert closed == [""] and play.census.snapshot() == {} and play.census.counts[State.ABORTED] == 1


def test_cancelled_episode_is_aborted_and_closed():
    census = Census()

    async def main() -> None:
        context = EpisodeContext(
            TaskConfig("t", None, [], World(fault="step hangs")), Format(), SamplingParams(10), 50, 100, 20.0,
            Model("ab."), no_scores, census,
        )  # fmt: skip
        work = asyncio.create_task(Episode(task(0), 0, context).run())
        while "acting" not in census.snapshot() or not census.counts[State.GENERATING] == 0:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    closed.clear()
    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert closed == ["step hangs"] and census.snapshot() == {} and census.counts[State.ABORTED] == 1


def scored(*results: Any, on_error: str = "drop") -> Any:
    from rollcli.rollout.environment_worker import EpisodeOrder
    from tests.rollout.doubles import trajectory

    done = trajectory(EpisodeOrder(task(0), 0, 0, SamplingParams(1)), 0.0)
    rewards = [RewardConfig(name, weight, on_error=on_error) for name, weight in (("a", 1.0), ("b", 0.5))]
    apply_scores(done, TaskConfig("t", None, rewards), list(results))
    return done


def test_scores_are_weighted_and_the_first_decides_accuracy():
    done = scored(RewardResult(1.0), RewardResult(1.0, accuracy=0.0))
    assert (done.reward, done.accuracy, done.rewards) == (1.5, 1.0, {"a": 1.0, "b": 1.0})
    assert scored(RewardResult(3.0, accuracy=0.25), RewardResult(2.0)).accuracy == 0.25


FAILURE = RewardFailure("timeout", "reward `b` exceeded its limit")


def test_failed_reward_drops_the_sample():
    done = scored(RewardResult(1.0), FAILURE)
    assert (done.usable, done.error_kind, done.error) == (False, "timeout", FAILURE.message)
    assert done.metrics == {"reward_failed/b": 1.0}


def test_failed_reward_scores_zero_when_told():
    done = scored(RewardResult(1.0), FAILURE, on_error="zero")
    assert (done.usable, done.reward, done.rewards) == (True, 1.0, {"a": 1.0, "b": 0.0})
    assert scored(FAILURE, RewardResult(1.0), on_error="zero").accuracy == 0.0


def test_failed_reward_ends_the_run_when_told():
    with pytest.raises(RewardError, match="exceeded its limit"):
        scored(RewardResult(1.0), FAILURE, on_error="fail")


REWARDS = """
import numpy

def infinite(response): return float("inf")
def undefined(response): return float("nan")
def nothing(response): response.strip()
def listed(response): return [0.5]
def several(response): return 1.0, 0.0, 1.0
def array(response): return numpy.ones(3)
def worded(response): return "right"
"""


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """Scores by name of a function in REWARDS, in a process of its own as reward workers do."""
    path = tmp_path_factory.mktemp("rewards") / "r.py"
    path.write_text(REWARDS)
    with IsolatedCaller(preload=()) as caller:

        async def score(config: TaskConfig, fields: dict) -> list:
            return [caller.call(f"{path}:{reward.name}", fields, 10.0) for reward in config.rewards]

        yield score


@pytest.mark.parametrize(
    ("name", "expected", "got"),
    [
        ("infinite", "a finite number", "inf"),
        ("undefined", "a finite number", "nan"),
        ("nothing", "one number", "None"),
        ("listed", "one number", "list of 1"),
        ("several", "one number", "tuple of 3"),
        ("array", "one number", "ndarray of shape (3,)"),
        ("worded", "one number", "str 'right'"),
    ],
)
def test_a_reward_that_is_no_number_drops_its_sample_and_says_what_it_was(scorer, name, expected, got):
    done = play(World(turns=1), Model("ab."), scorer, rewards=(name,))
    assert not done.usable and done.error_kind == "reward"
    assert f"`{name}`: expected {expected}, got {got}" in done.error
    good = play(World(turns=1), Model("ab."))
    made = Group(task(4), [done, good])
    assert len(Batch.from_groups([made])) == 1 and of_rollout([made], 0)[f"reward_failed/{name}"] == 1.0
    assert of_rollout([made], 0)["reward"] == good.reward


def test_reward_that_hangs_beyond_the_episode_is_a_timeout():
    async def hang(config: TaskConfig, fields: dict) -> list:
        await asyncio.Event().wait()

    done = play(World(turns=1), Model("ab."), hang, timeout_s=0.1)
    assert done.error_kind == "timeout" and closed == [""]


def test_the_configured_environment_is_copied_for_each_episode():
    world = World(turns=2)
    for _ in range(2):
        assert len(play(world, Model("ab.", "c.")).turns) == 2
    assert world.step_number == 0


class Seeing(Format):
    """Shows an image as `#`, which a model must not say."""

    forbidden = (ord("#"),)

    def images(self, messages: list[dict]) -> dict[str, np.ndarray] | None:
        if "broken" in messages[0]["content"]:
            raise ImageError("image `a.png` cannot be read")
        return {"pixel_values": np.full((1, 2), len(messages[0]["content"]))}


def test_images_of_all_turns_go_with_the_request_and_the_trajectory():
    model = Model("ab.", "c.", "def.")
    done = play(World(), model, format=Seeing())
    values = [request.images["pixel_values"][:, 0].tolist() for request in model.requests]
    assert values == [[10], [10, 5], [10, 5, 5]] and done.images["pixel_values"].shape == (3, 2)
    assert all(request.sampling.stop_token_ids == (ord("."), ord("#")) for request in model.requests)
    assert play(World(), Model("ab.", "c.", "def.")).images is None


def test_a_placeholder_that_was_sampled_ends_the_episode():
    async def model(request: Any) -> Completion:
        return Completion(request.id, Format().ids("a#"), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")

    done = play(World(), model, format=Seeing())
    assert (done.usable, len(done.turns), done.stop_reason) == (True, 1, "stop")


def test_an_image_that_cannot_be_read_fails_its_sample():
    class Broken(World):
        async def reset(self, task: Any) -> list[dict]:
            return [{"role": "user", "content": "broken"}]

    done = play(Broken(), Model(), format=Seeing())
    assert (done.error_kind, done.error) == ("image", "image `a.png` cannot be read")


def lead(environment: Any, generate: Any, score: Any = no_scores, **changes: Any) -> list[Trajectory]:
    """Plays an episode that its environment leads; returns its trajectories."""
    context = {
        "config": TaskConfig("t", None, [RewardConfig("good")], environment), "format": Format(),
        "sampling": SamplingParams(max_tokens=10, temperature=0.7), "max_prompt_tokens": 50, "max_context": 60,
        "timeout_s": 20.0, "generate": generate, "score": score, "census": Census(), **changes,
    }  # fmt: skip

    async def main() -> list[Trajectory]:
        return await asyncio.wait_for(Episode(task(4), 2, EpisodeContext(**context)).run(), LIMIT_S)

    try:
        return asyncio.run(main())
    finally:
        lead.census = context["census"]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def texts(trajectories: list[Trajectory]) -> list[str]:
    return ["".join(map(chr, each.tokens)) for each in trajectories]


class Led:
    """An environment whose `play` is the function it is made with."""

    def __init__(self, play: Any, blocking: bool = False) -> None:
        self.function, self.blocking = play, blocking

    def __deepcopy__(self, memo: Any) -> Led:
        return self

    async def play(self, task: Any, model: Any) -> Any:
        return await self.function(model)

    async def close(self) -> None:
        pass


async def duel(model: Any) -> dict[str, StepResult]:
    first = await model([user("a")], "first")
    second = await model([user("b")], "second")
    await model([user("a"), said(first.text), user(second.text)], "first")
    return {"first": StepResult(reward=1.0), "second": StepResult(reward=-1.0, metrics={"lost": 1})}


@pytest.mark.parametrize("blocking", [False, True])
def test_each_player_has_a_trajectory_and_a_reward_of_its_own(blocking):
    players = lead(Led(duel, blocking), Model("x.", "y.", "z."))
    assert [(each.agent, each.sample) for each in players] == [("first", 2), ("second", 2)]
    assert texts(players) == ["a>x.y>z.", "b>y."]
    assert [each.turn_rewards for each in players] == [[0.0, 1.0], [-1.0]]
    assert [each.reward for each in players] == [2.0, 0.0], "and 1 by the reward function"
    assert players[1].metrics["lost"] == 1 and lead.census.snapshot() == {}


def test_a_chat_that_is_rewritten_becomes_another_trajectory_with_the_same_reward():
    asked = []

    async def summarize(model: Any) -> StepResult:
        first = await model([user("long")])
        await model([user("sum"), said(first.text), user("on")])
        return StepResult(reward=0.5, fields={"tests": 3})

    async def score(config: TaskConfig, fields: dict) -> list:
        asked.append(fields)
        return [RewardResult(1.0)]

    parts = lead(Led(summarize), Model("x.", "y."), score)
    assert texts(parts) == ["long>x.", "sumxon>y."]
    assert [each.reward for each in parts] == [1.5, 1.5] and len(asked) == 1
    assert asked[0]["response"] == "y" and asked[0]["tests"] == 3


def test_untrained_chats_leave_no_trajectory_but_their_replies():
    async def interview(model: Any) -> StepResult:
        question = await model([user("ask")], "user", trained=False)
        await model([user(question.text)])
        return StepResult()

    assert texts(lead(Led(interview), Model("why.", "so."))) == ["why>so."]

    async def alone(model: Any) -> StepResult:
        await model([user("ask")], trained=False)
        return StepResult()

    [failed] = lead(Led(alone), Model("why."))
    assert failed.error_kind == "environment" and "without a trained turn" in failed.error


def test_a_spent_budget_is_told_to_the_environment_and_else_ends_the_episode_as_cut():
    caught = []

    async def on(model: Any) -> StepResult:
        chat = [user("q")]
        try:
            while True:
                reply = await model(chat)
                chat += [said(reply.text), user("+")]
        except OutOfTokens as error:
            caught.append(error.message)
            return StepResult(reward=0.25)

    async def careless(model: Any) -> StepResult:
        reply = await model([user("q")])
        await model([user("q"), said(reply.text), user("+")])

    [done] = lead(Led(on), Model("abcd.", "efgh."))
    assert "said all 10 tokens" in caught[0] and (done.reward, done.stop_reason) == (1.25, "stop")
    [done] = lead(Led(careless), Model("abcdefghijk"))
    assert (done.stop_reason, done.usable, done.reward) == ("length", True, 1.0)


def test_an_answer_may_be_shorter_than_the_budget_and_cut_chats_begin_anew():
    async def short(model: Any) -> StepResult:
        reply = await model([user("q")], max_tokens=3, stop=("!",))
        assert (reply.text, reply.stop_reason, reply.tokens) == ("abc", "length", 3)
        await model([user("q"), said("abc"), user("+")])
        return StepResult()

    model = Model("abcdef.", "x.")
    assert texts(lead(Led(short), model)) == ["q>abc", "qabc+>x."]
    assert model.requests[0].sampling.stop == ("!",) and model.requests[1].sampling.max_tokens == 7


def test_answers_asked_for_at_once_are_trajectories_apart_and_each_has_draws_of_its_own():
    async def branch(model: Any) -> StepResult:
        await asyncio.gather(model([user("q")]), model([user("q")]))
        return StepResult()

    model = Model("x.", "y.")
    assert sorted(texts(lead(Led(branch), model))) == ["q>x.", "q>y."]
    assert len({request.seed for request in model.requests}) == 2


def test_a_worker_that_ends_is_told_whatever_the_environment_makes_of_it():
    async def stubborn(model: Any) -> StepResult:
        try:
            await model([user("q")])
        except Exception:
            return StepResult(reward=9.0)

    async def die(request: Any) -> None:
        raise WorkerDied("gone")

    with pytest.raises(WorkerDied):
        lead(Led(stubborn), die)


def test_what_was_asked_ends_with_the_episode():
    hanging = []

    async def forgetful(model: Any) -> StepResult:
        await model([user("q")])
        hanging.append(asyncio.ensure_future(model([user("r")], "other")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return StepResult()

    model = Model("x.")

    async def generate(request: Any) -> Any:
        return await (model(request) if model.texts else asyncio.Event().wait())

    [done] = lead(Led(forgetful), generate)
    assert done.usable and hanging[0].cancelled()


@pytest.mark.parametrize(
    ("result", "message"),
    [({"other": StepResult()}, "no result for agent `first`"), ("won", "`play` returned str"), (None, "NoneType")],
)
def test_results_for_nobody_fail_the_episode(result, message):
    async def play(model: Any) -> Any:
        await model([user("q")], "first")
        return result

    [failed] = lead(Led(play), Model("x."))
    assert failed.error_kind == "environment" and message in failed.error
