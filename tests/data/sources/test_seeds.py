"""Seeds make the instances, and the splits share none."""

from rollcli.config.schema import TaskConfig
from rollcli.data.sources.seeds import SeedsSource
from rollcli.data.stream import TaskSequence


def test_every_task_has_a_seed_of_its_own() -> None:
    config = TaskConfig("pole", SeedsSource())
    seeds = [TaskSequence(config, split, 3)[index].seed for split in ("train", "test") for index in range(20)]
    assert len(set(seeds)) == 40


def test_a_prompt_is_a_message_before_the_environments() -> None:
    assert SeedsSource().open("train", 0)[0].messages == []
    assert SeedsSource("Balance.").open("train", 0)[4].messages == [{"role": "user", "content": "Balance."}]
