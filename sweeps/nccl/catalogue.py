"""NCCL's environment variables as data: legal values, defaults, versions, expected effect on decode.

The table is `variables.csv`. Names, defaults and versions were read from NCCL's source, 2.3.5 to 2.30.7: `since`
is the first release that reads the name, `until` the last one (empty if the newest still does). `decode` is the effect
to expect on an all-reduce of 14 to 130 KB on one PCIe node (batch 1): high, medium, low, none, or empty if nothing is
known.

`values` has a small language: `0|1` alternatives, `64..512 step 32` and `1..` whole numbers, `integer`, `numbers 6`,
`path`, `text`, and `list A B` for the per-function lists of NCCL_ALGO and NCCL_PROTO (see `nccl`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

OLDEST_NCCL = (2, 27)
"""Supported SGLang versions bring this release or a newer one."""

_INTEGER = re.compile(r"[-+]?(0|[1-9]\d*|0[xX][0-9a-fA-F]+)")
_RANGE = re.compile(r"(\d+)\.\.(\d*)(?: step (\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One variable that NCCL reads."""

    name: str
    values: str
    default: str | None
    since: str | None
    until: str | None
    """None: still read by the newest release in the table."""
    decode: str | None
    note: str | None

    @property
    def gone(self) -> bool:
        """No supported NCCL reads it any more."""
        return self.until is not None and release(self.until) < OLDEST_NCCL

    def problem(self, value: str) -> str | None:
        """What was wanted, if `value` is illegal; else None. Lists are checked by `nccl`, not here."""
        kind, _, rest = self.values.partition(" ")
        if not value.strip() or value != value.strip() or not value.isprintable():
            return "wanted a value without blanks around it"
        match kind:
            case "text" | "path" | "list":
                return None
            case "integer":
                return None if _INTEGER.fullmatch(value) else "wanted a whole number (NCCL reads anything else as 0)"
            case "numbers":
                numbers = value.split()
                whole = len(numbers) == int(rest) and all(map(_INTEGER.fullmatch, numbers))
                return None if whole else f"wanted {rest} whole numbers with blanks between them"
        alternatives = self.values.split("|")
        if any(_fits(value, alternative) for alternative in alternatives):
            return None
        return f"wanted {'one of ' if len(alternatives) > 1 else ''}{', '.join(map(_describe, alternatives))}"


def release(version: str) -> tuple[int, ...]:
    """`2.27.3` as a tuple that compares."""
    return tuple(int(part) for part in version.split("."))


def _fits(value: str, alternative: str) -> bool:
    bounds = _RANGE.fullmatch(alternative)
    if bounds is None:
        return value == alternative
    low, high, step = (int(part) if part else None for part in bounds.groups())
    assert low is not None
    number = int(value) if re.fullmatch(r"0|[1-9]\d*", value) else -1
    return number >= low and (high is None or number <= high) and number % (step or 1) == 0


def _describe(alternative: str) -> str:
    bounds = _RANGE.fullmatch(alternative)
    if bounds is None:
        return alternative
    low, high, step = bounds.groups()
    kind = f"a multiple of {step}" if step else "a whole number"
    return f"{kind} from {low} to {high}" if high else f"{kind} from {low}"


def _read(path: Path) -> Mapping[str, Variable]:
    with path.open(encoding="utf-8", newline="") as rows:
        variables = (
            Variable(
                name=row["name"],
                values=row["values"],
                **{column: row[column] or None for column in ("default", "since", "until", "decode", "note")},
            )
            for row in csv.DictReader(rows)
        )
        return MappingProxyType({variable.name: variable for variable in variables})


CATALOGUE = _read(Path(__file__).with_name("variables.csv"))
"""Every known variable by name."""
