"""The arguments that a server resolved, from the line of its log that tells them."""

from __future__ import annotations

import re
from collections.abc import Iterator


def resolved_arguments(text: str) -> dict[str, str | None]:
    """The server's own account of its arguments, by field name (`speculative_num_steps`); nested values stay text.

    Empty if the log has no `server_args=` line. Both spellings are read: `ServerArgs(name=value)`
    and a dict literal (`versions`).
    """
    match = re.search(r"server_args=(?:ServerArgs\((?P<call>.*)\)|\{(?P<literal>.*)\})\s*$", text, re.MULTILINE)
    if match is None:
        return {}
    arguments: dict[str, str | None] = {}
    for item in _split(match["call"] or match["literal"]):
        name, _, value = item.partition("=" if match["call"] else ":")
        value = value.strip()
        arguments[name.strip(" '\"")] = None if value == "None" else _unquoted(value)
    return arguments


def _split(text: str) -> Iterator[str]:
    """Split at the commas outside quotes and brackets."""
    depth, start, quote, escaped = 0, 0, "", False
    for position, letter in enumerate(text):
        if quote:
            quote = quote if escaped or letter != quote else ""
            escaped = letter == "\\" and not escaped
        elif letter in "'\"":
            quote = letter
        elif letter in "([{<":
            depth += 1
        elif letter in ")]}>":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if text[start:].strip():
        yield text[start:]


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
