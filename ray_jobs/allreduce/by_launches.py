"""Verdicts of tables of schema 1, whose sets ran one after the other in launches of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_jobs.allreduce.set_rows import (
    ALL_REDUCES_PER_FORWARD,
    DEFAULT_AGAIN,
    DEFAULT_SET,
    Row,
    SetVerdict,
    failure_of,
    is_shown_by_choice,
    mode_of,
    names_of,
    seen_choice,
    verdict_of,
)

MIN_DIFFERENCE = 0.03
"""Share of the default's median below which a difference is not worth a trial."""
MAX_LAUNCH_DIFFERENCE = 0.10
"""Share by which launches of one and the same choice were seen to differ: 9.8 %, two H200, NCCL 2.28.9
(`recordings/nccl_allreduce_h200_x2`), in two modes. No smaller difference counts, because
a table estimates its own noise poorly."""
ENOUGH_LAUNCHES = 5
"""Launches of one choice that show both of two equally likely modes in 15 of 16 tables."""
_OWN = (DEFAULT_SET, DEFAULT_AGAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Default:
    """The default's choice in all its launches; dictionaries by tokens."""

    choice: Mapping[int, tuple[Any, ...]]
    """Only if NCCL's log told it."""
    base: Mapping[int, Mapping[str, float]]
    """Over the launches: mean of medians, union of spreads (p10 to p90)."""
    launches: int
    """At the size that has the fewest; 0 if the log told no choice, as is `noise`."""
    noise: float
    """The largest ratio of two medians of one size, less one."""


def judge_sets(rows: Sequence[Row]) -> tuple[SetVerdict, ...]:
    """One verdict per set, in the order of the table, on CUDA-graph replay if it was measured, else eager.

    A set is `slower` or `faster` at a size if its spread does not meet the default's and the medians differ by more
    than `MIN_DIFFERENCE`. If NCCL's log tells what it chose, sets that choose as the default does and can do nothing
    else are `same`: launches of the default, whose largest difference (`MAX_LAUNCH_DIFFERENCE`, if larger, if the
    table has few of them) is noise that every other set must exceed.
    """
    mode = mode_of(rows)
    default = _default(rows, mode)
    return tuple(_judge(name, rows, mode, default) for name in names_of(rows) if name not in _OWN)


def launch_noise(rows: Sequence[Row]) -> float | None:
    """By what share launches of the default's choice differ at most; None if NCCL's log told no choice."""
    default = _default(rows, mode_of(rows))
    return default.noise if default.choice else None


def _judge(name: str, rows: Sequence[Row], mode: str, default: _Default) -> SetVerdict:
    if (failed := failure_of(name, rows)) is not None:
        return failed
    if not default.base:
        return SetVerdict(name=name, verdict="no default to compare with", detail="", gain_us={})
    own = _by_tokens(rows, name, mode)
    gain_us = {
        tokens: default.base[tokens]["us_median"] - row["us_median"]
        for tokens, row in own.items()
        if tokens in default.base and _differs(row, default)
    }
    per_forward = {tokens: gain * ALL_REDUCES_PER_FORWARD / 1000 for tokens, gain in gain_us.items()}
    detail = ", ".join(f"{tokens} tok {-ms:+.2f} ms" for tokens, ms in per_forward.items())
    return SetVerdict(name=name, verdict=verdict_of(gain_us), detail=detail or _why_same(own, default), gain_us=gain_us)


def _differs(row: Row, default: _Default) -> bool:
    base, least = default.base[row["tokens"]], max(MIN_DIFFERENCE, default.noise)
    equal = _chooses_as(row, default)
    if equal and is_shown_by_choice(row):
        return False
    if equal or 0 < default.launches < ENOUGH_LAUNCHES:
        least = max(least, MAX_LAUNCH_DIFFERENCE)
    meet = base["us_p10"] <= row["us_p90"] and row["us_p10"] <= base["us_p90"]
    return not meet and abs(row["us_median"] / base["us_median"] - 1) > least


def _why_same(own: Mapping[int, Row], default: _Default) -> str:
    equal = [tokens for tokens, row in own.items() if _chooses_as(row, default)]
    if not equal:
        return ""
    where = "" if len(equal) == len(own) else f" at {', '.join(map(str, equal))} tok"
    return f"NCCL makes its default choice{where}; launches of the default differ by up to {default.noise:.1%}"


def _default(rows: Sequence[Row], mode: str) -> _Default:
    first = _by_tokens(rows, DEFAULT_SET, mode)
    choice = {tokens: seen for tokens, row in first.items() if (seen := seen_choice(row)) is not None}
    alone = _Default(choice=choice, base={}, launches=0, noise=0.0)
    launches: dict[int, list[Row]] = {tokens: [] for tokens in first}
    for name in names_of(rows):
        for tokens, row in _by_tokens(rows, name, mode).items():
            if tokens in launches and (name in _OWN or (_chooses_as(row, alone) and is_shown_by_choice(row))):
                launches[tokens].append(row)
    ratios = [_ratio([row["us_median"] for row in launches[tokens]]) for tokens in choice]
    return _Default(
        choice=choice,
        base={tokens: _merged(found) for tokens, found in launches.items()},
        launches=min((len(launches[tokens]) for tokens in choice), default=0),
        noise=max(ratios, default=1.0) - 1.0,
    )


def _by_tokens(rows: Sequence[Row], name: str, mode: str) -> dict[int, Row]:
    return {
        row["tokens"]: row for row in rows if row["set"] == name and row.get("mode") == mode and row["outcome"] == "ok"
    }


def _merged(rows: Sequence[Row]) -> dict[str, float]:
    return {
        "us_median": sum(row["us_median"] for row in rows) / len(rows),
        "us_p10": min(row["us_p10"] for row in rows),
        "us_p90": max(row["us_p90"] for row in rows),
    }


def _ratio(medians_us: Sequence[float]) -> float:
    return max(medians_us) / min(medians_us)


def _chooses_as(row: Row, default: _Default) -> bool:
    seen = seen_choice(row)
    return seen is not None and seen == default.choice.get(row["tokens"])
