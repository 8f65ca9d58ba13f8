"""How numbers, times and foreign text are written, in dashboard and lines alike."""

from __future__ import annotations

import math
import unicodedata
from typing import Any


def clean(text: Any) -> str:
    """Returns text that cannot move the cursor or hide anything: what models and libraries write is not trusted.

    Line ends become `⏎`, tabs spaces, control characters their pictures (ESC is `␛`), other characters that are
    invisible or reorder what is beside them `�`.
    """
    text = str(text).replace("\r\n", "\n").replace("\n", "⏎").replace("\t", " ")
    return text if text.isprintable() else "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return " " if unicodedata.category(character) == "Zs" else "�"


def number(value: float, digits: int = 3) -> str:
    """Returns a plain number; one that would read as 0 with this many digits is written with an exponent."""
    if value != 0 and abs(value) < 0.5 * 10**-digits:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def count(value: float) -> str:
    """Returns a whole number with thousands separated."""
    return f"{round(value):,}"


def rate(value: float) -> str:
    """Returns a rate in at most four characters and a prefix: 950, 11.4k, 1.2M."""
    for factor, prefix in ((1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.1f}{prefix}"
    return f"{value:.0f}"


def percent(share: float) -> str:
    """Returns a share in percent, with a decimal where it is small."""
    value = round(100 * share, 1)
    return f"{value:.1f} %" if abs(value) < 10 and value != int(value) else f"{value:.0f} %"


def seconds(value: float) -> str:
    """Returns a short time in seconds."""
    return f"{value:.1f} s" if value < 99.95 else f"{value:.0f} s"


def duration(value: float) -> str:
    """Returns a time as people say it: 42s, 5m 03s, 2h 11m, 3d 04h."""
    whole = max(0, round(value)) if math.isfinite(value) else 0
    for big, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= big:
            return f"{whole // big}{names[0]} {whole % big // small:02d}{names[1]}"
    return f"{whole}s"


def signed(value: float, digits: int = 2) -> str:
    """Returns a change with a sign that does not rest on color."""
    if abs(value) < 0.5 * 10**-digits:
        return f"= {0:.{digits}f}"
    return f"▲ +{value:.{digits}f}" if value > 0 else f"▼ -{-value:.{digits}f}"


def interval(scale: tuple[float, float]) -> str:
    """Returns the label of a scale: 0–1, -0.5–2, 0–5k."""
    return "–".join(_short(end) for end in scale)


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:g}"
