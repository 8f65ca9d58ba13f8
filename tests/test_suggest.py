import pytest

from rollcli.suggest import did_you_mean, nearest

KEYS = ["group_size", "steps", "seed", "kl_coefficient", "clip_low", "clip_high", "minibatches"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("group_sise", "group_size"),
        ("stpes", "steps"),
        ("STEPS", "steps"),
        ("kl", "kl_coefficient"),
        ("minibatch", "minibatches"),
        ("entropy", None),
        ("", None),
        ("k", None),
    ],
)
def test_did_you_mean(word, meant):
    assert did_you_mean(word, KEYS) == meant


def test_part_of_a_name_is_close():
    assert nearest("math", ["grpo-math", "sokoban"]) == ["grpo-math"]


def test_best_first_and_ties_by_name():
    assert nearest("clip", KEYS, count=2) == ["clip_high", "clip_low"]
    assert nearest("clip_hihg", KEYS, count=3)[0] == "clip_high"


def test_nothing_known_nothing_meant():
    assert did_you_mean("a", []) is None


def test_cutoff():
    assert nearest("abcd", ["abxy"], cutoff=0.4) == ["abxy"]  # 2 * 2 / 8 = 0.5
    assert nearest("abcd", ["abxy"], cutoff=0.6) == []
