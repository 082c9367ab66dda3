"""Numbers as a reader takes them in."""

import math


def number(value: float) -> str:
    """Three significant digits, an exponent only far from 1: 0.0312, 5.83, 12,400, 2e-6."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def percent(value: float) -> str:
    """One decimal: 84.4 %."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else str(value)


def signed(words: str) -> str:
    """With its sign in front, a minus as long as the plus."""
    return "−" + words[1:] if words.startswith("-") else "+" + words


def duration(seconds: float) -> str:
    """The two largest units: 4.2 s, 3 min 12 s, 2 h 5 min."""
    if not seconds < 3.6e9:  # a clock that went wrong
        return f"{number(seconds)} s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours:,} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def count(n: int, thing: str) -> str:
    """``1 step``, ``1,200 steps``."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def listed(things: list[str], limit: int = 8) -> str:
    """``1, 2, 3 and 4 more``."""
    rest = len(things) - limit
    return ", ".join(things[:limit]) + (f" and {rest} more" if rest > 0 else "")
