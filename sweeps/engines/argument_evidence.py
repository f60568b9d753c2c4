"""What became of every requested server argument: by the server's own account, its log and its ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sweeps.engines.base import Evidence, Grade


def grade_arguments(
    requested: Mapping[str, str],
    resolved: Mapping[str, str | None],
    *,
    in_ranks: Sequence[Mapping[str, str]] = (),
    logged: Mapping[str, str | None] | None = None,
) -> tuple[Evidence, ...]:
    """One row per requested argument (and rank, if ranks report it).

    Args:
        requested: by the resolved names (`speculative_num_steps`).
        resolved: the server's own account, from /server_info.
        logged: the same from the line in its log; if the two differ, the one that contradicts the request counts.
        in_ranks: what each rank's worker holds, by the same names; may know fewer (of switches only it knows).
    """
    rows = []
    for name, value in sorted(requested.items()):
        for rank, held in enumerate(in_ranks or ({},)):
            seen = resolved.get(name)
            told = [each for each in (seen, (logged or {}).get(name)) if each is not None]
            contrary = (each for each in told if not _equal(each, value))
            effective = held.get(name, next(contrary, next(iter(told), None)))
            grade: Grade = (
                "effective" if _equal(effective, value) else "not_seen" if effective is None else "overridden"
            )
            rows.append(
                Evidence(
                    rank=rank,
                    setting=f"args.{name}",
                    requested=value,
                    seen=seen,
                    effective=effective,
                    grade=grade,
                    detail=None
                    if grade == "effective"
                    else f"the server resolved it as {effective}, by rules of its own: see its log",
                )
            )
    return tuple(rows)


def _equal(held: str | None, wanted: str) -> bool:
    """Equal as numbers, truth values, lists or text: `4` and `4.0`, `true` and `True`, a path and its end."""
    if held is None:
        return wanted.lower() in ("none", "null")
    try:
        return float(held) == float(wanted)
    except ValueError:
        return _plain(held) == _plain(wanted) or ("/" in wanted and held.endswith(f"/{wanted}"))


def _plain(value: str) -> str:
    """Without what a command line, JSON and Python write differently: `1 2` and `[1, 2]`."""
    return re.sub(r"[\s,'\"\[\]()]+", " ", value).strip().lower()
