from rollcli.rollout.states import LIVING, Census, State


def test_living_episodes_are_counted_where_they_are():
    census = Census()
    for _ in range(3):
        census.admit()
    assert census.snapshot() == {"waiting": 3}
    census.move(State.WAITING, State.ACTING)
    census.move(State.ACTING, State.GENERATING)
    census.move(State.WAITING, State.FAILED)
    assert census.snapshot() == {"waiting": 1, "generating": 1}
    census.move(State.GENERATING, State.SCORING)
    census.move(State.SCORING, State.DONE)
    census.move(State.WAITING, State.ABORTED)
    assert census.snapshot() == {}
    assert (census.counts[State.DONE], census.counts[State.FAILED], census.counts[State.ABORTED]) == (1, 1, 1)


def test_every_state_is_told_in_the_table():
    from rollcli.rollout import states

    assert all(f"{state.value} " in states.__doc__ for state in State)
    assert set(State) - set(LIVING) == {State.DONE, State.FAILED, State.ABORTED}
