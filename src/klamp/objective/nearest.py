"""What a person most likely meant."""

import difflib
from collections.abc import Iterable


def nearest(given: object, known: Iterable[str]) -> str:
    """A closing half-sentence: the nearest right name, or all of them."""
    names = list(dict.fromkeys(known))
    close = difflib.get_close_matches(str(given), names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"one of {', '.join(names)}"
