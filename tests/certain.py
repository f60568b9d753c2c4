"""For results that may be absent by type and must be there in a test."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def certain(value: T | None) -> T:
    """The value; fails the test where it is None."""
    assert value is not None
    return value
