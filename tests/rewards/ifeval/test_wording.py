"""Words, letters, case and language, on small cases."""

import sys

import pytest

from rollcli.errors import RewardError
from rollcli.rewards.ifeval import wording


def test_words() -> None:
    assert wording.existence("A Keyword.", ["key"]) and not wording.existence("a", ["a", "b"])
    assert wording.frequency("no No", "no", "at least", 2) and wording.frequency("no", "no", "less than", 2)
    assert wording.forbidden_words("another", ["the"]) and not wording.forbidden_words("The end", ["the"])
    assert wording.existence("(a+)+$", ["(a+)+$"]) and not wording.existence("a" * 10_000 + "!", ["(a+)+$"])
    assert wording.letter_frequency("aA#", "a", "at least", 2) and wording.letter_frequency("##", "#", "at least", 2)
    assert wording.capital_word_frequency("I SAID X-RAY, no", "at least", 3)
    assert wording.no_comma("a;b") and not wording.no_comma("a,b")
    assert wording.quotation(' "a" ') and not wording.quotation('"')
    assert wording.end_checker('"Is it? THE END"', "the end") and not wording.end_checker("the end.", "the end")


def test_language() -> None:
    pytest.importorskip("langdetect")
    assert wording.response_language("Dies ist ein deutscher Satz über das Wetter.", "de")
    assert not wording.response_language("Dies ist ein deutscher Satz über das Wetter.", "en")
    assert wording.response_language("12345", "en")
    assert wording.english_capital("THIS IS A SENTENCE ABOUT THE WEATHER.") and not wording.english_capital("This")
    assert wording.english_lowercase("this is a sentence about the weather.") and not wording.english_lowercase("This")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(RewardError, match="langdetect") as raised:
        wording.response_language("text", "en")
    assert "rollcli[ifeval]" in raised.value.hint
