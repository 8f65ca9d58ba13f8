"""A step drawn: every letter is what a group does longest then, and the SVG holds every span."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

from rollcli.devices.picture import timeline_lines, timeline_svg
from rollcli.devices.workload import Segment

SPLIT = SimpleNamespace(
    step_s=10.0,
    devices={"policy": 4, "rollout": 4},
    timeline=(
        Segment("policy", "update", 6.0, 9.0), Segment("policy", "sync", 9.0, 10.0),
        Segment("rollout", "rollout", 0.0, 5.0), Segment("rollout", "tail", 5.0, 6.0),
    ),
)  # fmt: skip


def test_a_letter_for_every_share_of_the_step():
    lines = timeline_lines(SPLIT, 29)
    assert lines[0] == "policy   ............UUUUUUSS"
    assert lines[1] == "rollout  RRRRRRRRRRrr........"
    assert lines[2].split() == ["0", "10.0", "s"] and len(lines[2]) == 29
    assert lines[3].strip() == ". idle  U update  S sync  R rollout  r tail"


def test_roles_that_take_turns_have_one_line():
    together = SimpleNamespace(step_s=10.0, devices={"all": 8}, timeline=SPLIT.timeline)
    lines = timeline_lines(together, 25)
    assert lines[0] == "all  RRRRRRRRRRrrUUUUUUSS"


def test_the_drawing_is_xml_with_a_box_for_every_span():
    drawn = ElementTree.fromstring(timeline_svg(SPLIT, "a < b"))
    boxes = [element for element in drawn if element.tag.endswith("rect")]
    assert [float(box.get("width")) for box in boxes] == [240.0, 80.0, 400.0, 80.0]
    assert [box[0].text for box in boxes] == ["update, 3.00 s", "sync, 1.00 s", "rollout, 5.00 s", "tail, 1.00 s"]
    texts = [element.text for element in drawn if element.tag.endswith("text")]
    assert texts[0] == "a < b" and "10.0 s" in texts
