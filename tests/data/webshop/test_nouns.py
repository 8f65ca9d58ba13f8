"""Which words of a title count."""

from rollcli.data.webshop.nouns import nouns


def test_names_of_things_count_and_other_words_do_not() -> None:
    title = "The Men's New Slim-Fit T-Shirt, 3 Pack (12oz) & Café Mug for You and 4K TV"
    assert nouns(title) == {"men", "fit", "shirt", "pack", "café", "mug", "tv"}


def test_a_title_may_have_none() -> None:
    assert nouns("") == nouns("The 2 New Ones") - {"ones"} == set()
