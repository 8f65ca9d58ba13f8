"""A Gymnasium environment with a few lines around it."""

import asyncio
import sys
from dataclasses import dataclass

import pytest

from rollcli.data.carriers import Task
from rollcli.environments.blocking import perform
from rollcli.environments.gym import Gym, import_gymnasium
from rollcli.errors import PluginError


@dataclass
class CartPole(Gym):
    """Pushes a cart."""

    id: str = "CartPole-v1"

    def render(self, observation):
        return "angle {2:.3f}".format(*observation)


def test_an_episode_is_gymnasiums() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    own = gymnasium.make("CartPole-v1")
    seen, _ = own.reset(seed=5)

    async def play() -> None:
        game = CartPole(actions=["push left", "push right"], max_turns=200)
        opened = await perform(game, "reset", Task("t", 0, [], seed=5))
        assert opened == [{"role": "user", "content": game.render(seen)}]
        invalid = await perform(game, "step", "jump")
        assert "push left, push right" in invalid.messages[0]["content"] and not invalid.done
        result = invalid
        while not result.done:
            result = await perform(game, "step", "I PUSH LEFT")
            observed, reward, is_over, _, _ = own.step(0)
            assert (result.reward, result.done) == (reward, is_over)
            assert result.done or result.messages[0]["content"] == game.render(observed)
        assert result.fields["done_reason"] == "over" and result.metrics["success"] == 1
        await perform(game, "close")

    asyncio.run(play())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(PluginError, match="gymnasium") as caught:
        import_gymnasium()
    assert "rollcli[gymnasium]" in caught.value.hint
