"""The table of nccl-tests (`all_reduce_perf`): microseconds by size, for the search's all-reduce prior."""

from __future__ import annotations

import re
from collections.abc import Iterable

from analysis.importing.records import AllReduceTime, Reading, check_share

FORMAT = "nccl-tests table"
_ROW = re.compile(r"^\s*(?:\S+:\s+)?(?P<size>\d{1,15})\s+(?P<count>\d{1,15})\s+(?P<type>[a-z]\w*)\s+(?P<rest>.*)$")
_TIME = re.compile(r"\d{1,12}(?:\.\d{1,6})?")
_RANK = re.compile(r"^#\s+Rank\s+(?P<rank>\d{1,6})\b")
_HEADER = re.compile(r"^#.*\b(?:algbw|busbw)\b")
_BEFORE_TIME = 2
"""Words between type and the first time: reduction and root."""


def is_nccl_tests(text: str) -> bool:
    """Whether a text holds such a table."""
    return any(_HEADER.match(line) for line in text.splitlines())


def read_nccl_tests(lines: Iterable[str], *, source: str) -> Reading:
    """Read a table; out-of-place times are taken, as a server reduces. Raises ImportFileError."""
    found, unparsed, ranks = [], 0, set()
    for line in lines:
        if (rank := _RANK.match(line)) is not None:
            ranks.add(int(rank["rank"]))
        elif (row := _ROW.match(line)) is not None:
            time = _row(row)
            if time is None:
                unparsed += 1
            else:
                found.append(time)
    check_share(unparsed, len(found) + unparsed, what="rows of an nccl-tests table")
    wrong = sum(each.is_right is False for each in found)
    notes = (f"{wrong} sizes with wrong sums are left out",) if wrong else ()
    return Reading(
        source=source,
        format=FORMAT,
        all_reduces=tuple(found),
        num_ranks=len(ranks) or None,
        understood=len(found),
        unparsed=unparsed,
        notes=notes,
    )


def _row(row: re.Match[str]) -> AllReduceTime | None:
    words = row["rest"].split()
    times = words[_BEFORE_TIME:] if words and not _TIME.fullmatch(words[0]) else words
    if not times or not _TIME.fullmatch(times[0]) or float(times[0]) <= 0 or int(row["size"]) <= 0:
        return None
    wrong = times[3] if len(times) > 3 else "N/A"
    is_right = int(wrong) == 0 if wrong.isascii() and wrong.isdigit() else None
    return AllReduceTime(num_bytes=int(row["size"]), us=float(times[0]), is_right=is_right)
