import pytest

from rollcli.monitor.series import MOST_POINTS, Series, scale_of


def series(*values):
    made = Series()
    for step, value in enumerate(values, 1):
        made.add(step, value)
    return made


def test_first_last_change_and_extremes():
    made = series(0.5, 0.25, 1.0)
    assert (made.first, made.last, made.low, made.high) == ((1, 0.5), (3, 1.0), 0.25, 1.0)
    assert made.change == 0.5
    assert Series().change == 0.0


def test_sparkline_is_on_the_given_scale():
    assert series(0.0, 0.5, 1.0).sparkline(10, (0.0, 1.0)) == "▁▄▇"
    assert series(0.0, 0.5, 1.0).sparkline(10, (0.0, 10.0)) == "▁▁▁"
    assert series(-5.0, 5.0).sparkline(10, (0.0, 1.0)) == "▁▇"


def test_noise_does_not_look_like_progress():
    made = series(0.500, 0.501, 0.499, 0.502)
    assert set(made.sparkline(10, scale_of(made, 1.0))) == {"▄"}


def test_sparkline_shows_the_whole_run_without_a_full_block():
    line = series(*[index / 999 for index in range(1000)]).sparkline(7, (0.0, 1.0))
    assert line == "▁▂▃▄▅▆▇"
    assert Series().sparkline(7, (0.0, 1.0)) == ""


@pytest.mark.parametrize(
    "values, base, expected",
    [
        ([0.0, 0.3], 1.0, (0.0, 1.0)),
        ([1.0], 1.0, (0.0, 1.0)),
        ([1.01], 1.0, (0.0, 2.0)),
        ([-0.2, 3.0], 1.0, (-1.0, 5.0)),
        ([-7.0], 1.0, (-10.0, 1.0)),
        ([0.0051], 0.01, (0.0, 0.01)),
        ([0.012], 0.01, (0.0, 0.02)),
        ([384.0], 100.0, (0.0, 500.0)),
        ([1000.0], 100.0, (0.0, 1000.0)),
        ([10.0], 1.0, (0.0, 10.0)),
    ],
)
def test_scale_grows_in_fixed_steps(values, base, expected):
    assert scale_of(series(*values), base) == pytest.approx(expected)


def test_scale_never_shrinks():
    made = series(0.1, 4.0)
    for step in range(3, 3000):
        made.add(step, 0.1)
    assert scale_of(made, 1.0) == (0.0, 5.0)


def test_memory_is_bounded_and_the_shape_stays():
    made = Series()
    for step in range(1, 100_001):
        made.add(step, step / 100_000)
    assert len(made._points) <= MOST_POINTS
    assert (made.first, made.last) == ((1, 1e-5), (100_000, 1.0))
    assert made.sparkline(7, (0.0, 1.0)) == "▁▂▃▄▅▆▇"


def test_a_repeated_step_replaces_what_followed():
    made = series(0.0, 0.0, 1.0, 1.0)
    made.add(3, 0.0)
    assert made.sparkline(10, (0.0, 1.0)) == "▁▁▁"
    made.add(1, 0.5)
    assert made.first == made.last == (1, 0.5)
