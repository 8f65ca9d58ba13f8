import pytest

from rollcli.monitor import words


@pytest.mark.parametrize(
    "text, expected",
    [
        ("plain text", "plain text"),
        ("two\nlines\r\n", "two⏎lines⏎"),
        ("tab\there", "tab here"),
        ("\x1b[2J\x1b[31mred", "␛[2J␛[31mred"),
        ("\rback\x08\x07\x7f\x00", "␍back␈␇␡␀"),
        ("c1\x9b31m", "c1�31m"),
        ("\u202eright to left\u200b\ufeff", "�right to left��"),
        ("\ud800", "�"),
        ("\u2028\u2029", "��"),
        ("non\u00a0breaking\u3000wide", "non breaking wide"),
        ("答えは72 é ελ", "答えは72 é ελ"),
        ("[bold red]markup[/] \\boxed{7}", "[bold red]markup[/] \\boxed{7}"),
        (3.5, "3.5"),
    ],
)
def test_clean(text, expected):
    assert words.clean(text) == expected


def test_cleaned_text_is_printable():
    assert words.clean("".join(map(chr, range(0x3000)))).isprintable()


@pytest.mark.parametrize(
    "value, digits, expected",
    [(0.551, 3, "0.551"), (0.0051, 4, "0.0051"), (0.000021, 4, "2.1e-05"), (0.0, 3, "0.000"), (-1.5, 3, "-1.500")],
)
def test_number(value, digits, expected):
    assert words.number(value, digits) == expected


@pytest.mark.parametrize(
    "value, expected", [(0, "0"), (950, "950"), (999.6, "1.0k"), (11400, "11.4k"), (1_234_000, "1.2M")]
)
def test_rate(value, expected):
    assert words.rate(value) == expected


@pytest.mark.parametrize(
    "value, expected", [(0.0, "0 %"), (0.031, "3.1 %"), (0.07, "7 %"), (0.61, "61 %"), (0.999, "100 %"), (1.0, "100 %")]
)
def test_percent(value, expected):
    assert words.percent(value) == expected


@pytest.mark.parametrize(
    "value, expected",
    [(0, "0s"), (42.4, "42s"), (59.7, "1m 00s"), (303, "5m 03s"), (7860, "2h 11m"), (273_600, "3d 04h"), (-1, "0s")],
)
def test_duration(value, expected):
    assert words.duration(value) == expected


def test_duration_of_no_number():
    assert words.duration(float("nan")) == "0s"


@pytest.mark.parametrize("value, expected", [(0.43, "▲ +0.43"), (-0.126, "▼ -0.13"), (0.001, "= 0.00")])
def test_signed(value, expected):
    assert words.signed(value) == expected


def test_seconds_count_and_interval():
    assert (words.seconds(54.81), words.seconds(312.4)) == ("54.8 s", "312 s")
    assert words.count(3911.6) == "3,912"
    assert [words.interval(scale) for scale in ((0, 1), (-0.5, 2), (0, 5000), (0, 0.01))] == [
        "0–1",
        "-0.5–2",
        "0–5k",
        "0–0.01",
    ]
