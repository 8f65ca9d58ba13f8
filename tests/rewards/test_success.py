"""Success is the environment's word."""

from rollcli.rewards.base import call_reward
from rollcli.rewards.success import success


def test_success_is_what_the_environment_says() -> None:
    assert call_reward(success, {"success": 1.0}).score == 1.0
    assert call_reward(success, {"response": ""}).score == 0.0
