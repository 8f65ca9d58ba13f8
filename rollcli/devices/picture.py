"""A step as a picture: what each group of devices does when, in text or as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from rollcli.devices.simulate import Simulation
from rollcli.devices.workload import Segment

LETTERS = {"rollout": "R", "tail": "r", "logprobs": "L", "update": "U", "sync": "S", "switch": "X", "idle": "."}
COLOURS = {
    "rollout": "#4c78a8", "tail": "#9ecae9", "logprobs": "#b279a2", "update": "#f58518", "sync": "#54a24b",
    "switch": "#e45756",
}  # fmt: skip
"""Told apart by people who see few colours as well: each span carries its name."""
_ROW, _LEFT, _WIDTH = 26, 90, 800


def timeline_lines(simulation: Simulation, width: int) -> list[str]:
    """Returns a line of letters for each group of devices, and what the letters mean.

    A letter stands for what a group does longest in its share of the step; a group that takes turns has one line.
    """
    groups = _groups(simulation)
    label = max(len(name) for name in groups) + 2
    room = max(width - label, 10)
    lines = []
    used: dict[str, None] = {}
    for name, segments in groups.items():
        names = [_busiest(segments, simulation.step_s, place, room) for place in range(room)]
        used |= dict.fromkeys(names)
        lines.append(f"{name:<{label}}" + "".join(LETTERS.get(each, each[:1].upper()) for each in names))
    scale = f"{simulation.step_s:,.1f} s"
    lines.append(" " * label + "0" + scale.rjust(room - 1))
    lines.append(" " * label + "  ".join(f"{LETTERS.get(name, name[:1].upper())} {name}" for name in used))
    return lines


def timeline_svg(simulation: Simulation, title: str) -> str:
    """Returns the step as an SVG document."""
    groups = _groups(simulation)
    height = _ROW * (len(groups) + 2)
    scale = _WIDTH / simulation.step_s
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="4" y="16">{escape(title)}</text>',
    ]
    for row, (name, segments) in enumerate(groups.items(), 1):
        top = row * _ROW
        parts.append(f'<text x="4" y="{top + 17}">{escape(name)}</text>')
        for segment in segments:
            start, span = max(segment.start, 0.0), min(segment.end, simulation.step_s) - max(segment.start, 0.0)
            if span <= 0:
                continue
            box = f'x="{_LEFT + start * scale:.1f}" y="{top + 2}" width="{span * scale:.1f}" height="{_ROW - 6}"'
            colour = COLOURS.get(segment.name, "#bab0ac")
            said = f"{segment.name}, {span:.2f} s"
            parts.append(f'<rect {box} fill="{colour}"><title>{escape(said)}</title></rect>')
            if span * scale > 8 * len(segment.name):
                left = _LEFT + start * scale + 4
                parts.append(f'<text x="{left:.1f}" y="{top + 17}" fill="white">{escape(segment.name)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{height - 8}">0</text>')
    parts.append(f'<text x="{_LEFT + _WIDTH}" y="{height - 8}" text-anchor="end">{simulation.step_s:,.1f} s</text>')
    return "\n".join([*parts, "</svg>", ""])


def _groups(simulation: Simulation) -> dict[str, list[Segment]]:
    """Returns what each group does; where roles take turns, both are the same devices."""
    together = "all" in simulation.devices
    groups: dict[str, list[Segment]] = {}
    for segment in simulation.timeline:
        groups.setdefault("all" if together else segment.devices, []).append(segment)
    return groups


def _busiest(segments: Sequence[Segment], step_s: float, place: int, room: int) -> str:
    start, end = place * step_s / room, (place + 1) * step_s / room
    spent: dict[str, float] = {"idle": (end - start) * 1e-3}
    for segment in segments:
        span = min(end, segment.end) - max(start, segment.start)
        if span > 0:
            spent[segment.name] = spent.get(segment.name, 0.0) + span
    return max(spent, key=lambda name: spent[name])
