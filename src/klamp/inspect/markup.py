"""HTML in which forgetting to escape is not possible: what is not ``Html`` yet becomes text."""

import html
import json
from collections.abc import Iterable
from typing import Any

# JSON inside a <script> element must not be able to end it; json escapes all but ASCII by itself.
IN_SCRIPT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}
VOID = {"br", "meta", "link", "col"}


class Html(str):
    """A string that is HTML already."""


def text(value: str) -> Html:
    """The value as the reader should see it; what HTML cannot hold is replaced."""
    storable = value.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    return Html(html.escape(storable))


def tag(name: str, *children: str, **attributes: str | bool | None) -> Html:
    """An element. ``class_`` is the class, ``data_x`` is data-x; True is bare, None left out."""
    inside = "".join(child if isinstance(child, Html) else text(child) for child in children)
    opening = f"<{name}{''.join(attribute(k, v) for k, v in attributes.items())}>"
    return Html(opening if name in VOID else f"{opening}{inside}</{name}>")


def attribute(name: str, value: str | bool | None) -> str:
    """`` name="value"``, or nothing."""
    name = name.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{text(value)}"'


def joined(parts: Iterable[str], between: str = "") -> Html:
    """The parts in a row, each escaped unless it is HTML."""
    return Html(
        text(between).join(part if isinstance(part, Html) else text(part) for part in parts)
    )


def script_json(value: Any) -> Html:
    """A plain value as JSON that can stand inside a <script> element."""
    return Html(json.dumps(value, allow_nan=False, separators=(",", ":")).translate(IN_SCRIPT))
