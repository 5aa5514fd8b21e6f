"""Units that limits and defaults are written in, and the forms of a duration."""

import re
from fractions import Fraction
from typing import Final

MEBIBYTE: Final = 1024**2
GIBIBYTE: Final = 1024**3
HOUR_MS: Final = 3600 * 1000
DAY_MS: Final = 24 * HOUR_MS
#: Milliseconds → the names of that unit; the first one is shown.
_NAMES: Final = {
    1: ("ms", "millisecond", "milliseconds"),
    1000: ("s", "sec", "second", "seconds"),
    60_000: ("min", "m", "minute", "minutes"),
    HOUR_MS: ("h", "hour", "hours"),
    DAY_MS: ("days", "d", "day"),
}
#: Unit of a duration → milliseconds.
MILLIS: Final = {name: millis for millis, names in _NAMES.items() for name in names}
#: The units that messages name.
UNITS: Final = ", ".join(names[0] for names in _NAMES.values())
_DURATION: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]*)\Z")


def duration_ms(text: str, unit: str | None = None) -> Fraction:
    """Milliseconds of a duration such as ``36h``, ``1.5 days`` or ``10 min``; a plain number has the unit ``unit``.

    Raises: ValueError, also for a plain number if ``unit`` is None.
    """
    match = _DURATION.match(text.strip().replace("_", ""))
    named = (match[2].lower() or unit) if match else None
    if match is None or named not in MILLIS:
        raise ValueError
    return Fraction(match[1]) * MILLIS[named]


def duration_text(millis: int) -> str:
    """A duration in its largest whole unit, such as ``15 min``."""
    length = max((one for one in _NAMES if millis and millis % one == 0), default=1)
    return f"{millis // length} {'day' if millis == DAY_MS else _NAMES[length][0]}"
