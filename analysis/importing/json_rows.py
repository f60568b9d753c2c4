"""JSON of a benchmark: one document, or one object a line. Nothing is known here of what the objects mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def json_rows(text: str) -> tuple[list[tuple[int, Row]], int]:
    """Objects with the line that each begins on, and how many lines are no object.

    A text without any object is no JSON of a benchmark: ([], 0).
    """
    whole = _loaded(text)
    if isinstance(whole, dict):
        return [(1, whole)], 0
    if isinstance(whole, list):
        objects = [(1, each) for each in whole if isinstance(each, dict)]
        return objects, len(whole) - len(objects) if objects else 0
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    found = [(number, row) for number, line in lines if isinstance(row := _loaded(line), dict)]
    return found, len(lines) - len(found) if found else 0


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def holds(row: Row, names: Sequence[str]) -> bool:
    """Whether a row has all of these keys."""
    return all(name in row for name in names)
