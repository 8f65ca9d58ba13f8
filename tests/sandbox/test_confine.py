"""Parts of the confinement that can be looked at from outside; the whole is tested by what runs in it."""

import os

import pytest

from rollcli.sandbox import confine


@pytest.mark.skipif(os.getuid() != 0, reason="only root has other user ids")
def test_each_program_has_a_user_of_its_own():
    drawn = {confine.draw_uid() for _ in range(50)}
    assert len(drawn) == 50 and min(drawn) > 0 and os.getuid() not in drawn


def test_modes_on_the_way_decide_who_may_read(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    os.chmod(tmp_path / "a", 0o700)
    assert not confine.others_may_read(str(tmp_path / "a" / "b"))
    assert confine.others_may_read("/usr")
