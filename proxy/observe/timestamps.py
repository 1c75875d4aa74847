"""Times as text, made once a second at most: in UTC, independent of the locale."""

from __future__ import annotations

import time

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def common_log_time(second: int) -> str:
    """Seconds since the epoch as the Common Log Format has it: ``29/Nov/2026:22:00:00 +0000``."""
    at = time.gmtime(second)
    return f"{at.tm_mday:02}/{_MONTHS[at.tm_mon - 1]}/{at.tm_year:04}:{_clock_time(at)} +0000"


def _clock_time(at: time.struct_time) -> str:
    return f"{at.tm_hour:02}:{at.tm_min:02}:{at.tm_sec:02}"


def rfc3339_second(second: int) -> str:
    """Seconds since the epoch as RFC 3339 has it, without fraction and zone: ``2026-11-29T22:00:00``."""
    at = time.gmtime(second)
    return f"{at.tm_year:04}-{at.tm_mon:02}-{at.tm_mday:02}T{_clock_time(at)}"


def rfc3339_ms(now: float) -> str:
    """Seconds since the epoch as RFC 3339 with milliseconds: ``2026-11-29T22:00:00.123Z``."""
    second = int(now)
    return f"{rfc3339_second(second)}.{int((now - second) * 1000):03}Z"
