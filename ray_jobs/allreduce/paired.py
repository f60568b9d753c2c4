"""Verdicts of sets that were timed in the same rounds: paired differences, held against the spread of communicators.

Two communicators with equal variables differ, each steadily: rounds do not show it, only further communicators do. So a
difference is an effect of a set if it exceeds both its own uncertainty over the rounds and what communicators of one
kind differ by. Communicators of one kind are the copies of a set; sets for which NCCL chose as by default, and whose
variables can do nothing but change that choice, are further copies of the default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ray_jobs.allreduce.set_rows import (
    ALL_REDUCES_PER_FORWARD,
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

MAX_COMMUNICATOR_DIFFERENCE = 0.15
"""Share by which two communicators with equal variables in one process were seen to differ: 14.7 % (two H200, NCCL
2.28.9), in two modes. The least effect if the table has few communicators of one kind."""
ENOUGH_DEGREES = 6
"""Communicators beyond the first of their kind, to have seen both of two equally likely modes in 63 of 64 tables."""
CONFIDENCE = 0.99
"""That communicators with equal variables differ by less. One set is one claim: its sizes share their communicator."""
INTERVAL = 0.95

Communicator = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One set against the default at one size. Shares of the default's time; minus is faster."""

    share: float
    half_width: float
    """Half width of the 95 % t interval over rounds; infinite with one round."""
    least: float
    """What communicators of one kind may differ by."""
    base_us: float

    @property
    def is_effect(self) -> bool:
        return abs(self.share) > max(self.least, self.half_width)

    def __str__(self) -> str:
        width = f" +- {self.half_width:.1%}" if math.isfinite(self.half_width) else ""
        return f"{self.share:+.1%}{width}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How far communicators of one kind are apart."""

    largest: float
    """Largest ratio of two communicators of one kind at any size, less one."""
    deviation: float
    """Standard deviation, pooled over kinds and sizes."""
    degrees: int
    """Communicators beyond the first of their kind, at the size that has the fewest."""

    def least(self, own: int, base: int) -> float:
        """What the means of `own` and `base` communicators of one kind may differ by."""
        if self.degrees < ENOUGH_DEGREES:
            return max(self.largest, MAX_COMMUNICATOR_DIFFERENCE)
        quantile = stats.t.ppf((1 + CONFIDENCE) / 2, self.degrees)
        return max(self.largest, float(math.expm1(quantile * self.deviation * math.sqrt(1 / own + 1 / base))))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """Communicators at one size; logarithms relative to the mean of the default's communicators in the same round."""

    by_round: Mapping[Communicator, Mapping[int, float]]
    base: Sequence[Communicator]
    base_us: float
    chosen_alike: frozenset[str]
    """Sets for which NCCL chose as by default."""

    def levels(self, communicators: Iterable[Communicator]) -> list[float]:
        return [float(np.mean(list(self.by_round[each].values()))) for each in communicators]

    def copies(self, name: str) -> list[Communicator]:
        return [each for each in self.by_round if each[0] == name]


def is_paired(rows: Sequence[Row]) -> bool:
    """Whether the table was timed in rounds."""
    return any(row.get("round_us") for row in rows)


def judge_sets(rows: Sequence[Row]) -> tuple[SetVerdict, ...]:
    """One verdict per set, in the order of the table, on CUDA-graph replay if it was measured, else eager."""
    sizes = _sizes(rows)
    found = differences(rows)
    return tuple(_judge(name, rows, found, sizes) for name in names_of(rows) if name != DEFAULT_SET)


def differences(rows: Sequence[Row]) -> dict[str, dict[int, Difference]]:
    """Set -> tokens -> difference to the default; nothing for sets that share no round with it."""
    sizes = _sizes(rows)
    spread = _spread(sizes.values())
    found: dict[str, dict[int, Difference]] = {}
    for name in names_of(rows):
        for tokens, size in sizes.items():
            own = size.copies(name)
            if name != DEFAULT_SET and own:
                found.setdefault(name, {})[tokens] = _difference(own, size, spread)
    return found


def spread_of_communicators(rows: Sequence[Row]) -> Spread | None:
    """None if no kind has two communicators."""
    spread = _spread(_sizes(rows).values())
    return spread if spread.degrees else None


def _judge(
    name: str, rows: Sequence[Row], found: Mapping[str, Mapping[int, Difference]], sizes: Mapping[int, _Size]
) -> SetVerdict:
    if (failed := failure_of(name, rows)) is not None:
        return failed
    own = found.get(name)
    if own is None:
        return SetVerdict(name=name, verdict="no default to compare with", detail="", gain_us={})
    effects = {tokens: each for tokens, each in own.items() if each.is_effect and (name, tokens) not in _repeats(sizes)}
    gain_us = {tokens: -each.share * each.base_us for tokens, each in effects.items()}
    said = [
        f"{tokens} tok {-gain_us[tokens] * ALL_REDUCES_PER_FORWARD / 1000:+.2f} ms ({each})"
        for tokens, each in effects.items()
    ]
    alike = [tokens for tokens, size in sizes.items() if name in size.chosen_alike]
    if not said and alike:
        where = "" if len(alike) == len(sizes) else f" at {', '.join(map(str, alike))} tok"
        said = [f"NCCL makes its default choice{where}"]
    return SetVerdict(name=name, verdict=verdict_of(gain_us), detail=", ".join(said), gain_us=gain_us)


def _repeats(sizes: Mapping[int, _Size]) -> set[tuple[str, int]]:
    """Sets and tokens whose communicators are further copies of the default."""
    return {(name, tokens) for tokens, size in sizes.items() for name, _ in size.base if name != DEFAULT_SET}


def _difference(own: Sequence[Communicator], size: _Size, spread: Spread) -> Difference:
    rounds = sorted({number for each in own for number in size.by_round[each]})
    by_round = [
        float(np.mean([size.by_round[each][number] for each in own if number in size.by_round[each]]))
        for number in rounds
    ]
    half = (
        float(stats.sem(by_round) * stats.t.ppf((1 + INTERVAL) / 2, len(rounds) - 1)) if len(rounds) > 1 else math.inf
    )
    mean = float(np.mean(size.levels(own)))
    return Difference(
        share=math.expm1(mean),
        half_width=math.exp(mean) * half,
        least=spread.least(len(own), len(size.base)),
        base_us=size.base_us,
    )


def _spread(sizes: Iterable[_Size]) -> Spread:
    largest, variances, degrees = 0.0, [], []
    for size in sizes:
        repeats = {name for name, _ in size.base}
        others = dict.fromkeys(name for name, _ in size.by_round if name not in repeats)
        squares, free = 0.0, 0
        for kind in (size.base, *map(size.copies, others)):
            levels = size.levels(kind)
            if len(levels) < 2:
                continue
            largest = max(largest, math.expm1(max(levels) - min(levels)))
            squares += float(np.var(levels)) * len(levels)
            free += len(levels) - 1
        degrees.append(free)
        if free:
            variances.append(squares / free)
    deviation = math.sqrt(float(np.mean(variances))) if variances else 0.0
    return Spread(largest=largest, deviation=deviation, degrees=min(degrees, default=0))


def _sizes(rows: Sequence[Row]) -> dict[int, _Size]:
    """By tokens; sizes at which the default has no figures are left out."""
    mode = mode_of(rows)
    good = [row for row in rows if row.get("round_us") and row["mode"] == mode and row["outcome"] == "ok"]
    sizes = {}
    for tokens in dict.fromkeys(row["tokens"] for row in good):
        own = [row for row in good if row["tokens"] == tokens]
        default = [row for row in own if row["set"] == DEFAULT_SET]
        if default:
            sizes[tokens] = _size(own, default)
    return sizes


def _size(rows: Sequence[Row], default: Sequence[Row]) -> _Size:
    choice = seen_choice(default[0])
    alike = [row for row in rows if row["set"] != DEFAULT_SET and choice is not None and seen_choice(row) == choice]
    base = [*default, *(row for row in alike if is_shown_by_choice(row))]
    base_rounds: dict[int, list[float]] = {}
    for row in base:
        for number, us in zip(row["rounds"], row["round_us"], strict=True):
            base_rounds.setdefault(number, []).append(math.log(us))
    reference = {number: float(np.mean(logs)) for number, logs in base_rounds.items()}
    by_round = {
        (row["set"], row["copy"]): {
            number: math.log(us) - reference[number]
            for number, us in zip(row["rounds"], row["round_us"], strict=True)
            if number in reference
        }
        for row in rows
    }
    return _Size(
        by_round={each: logs for each, logs in by_round.items() if logs},
        base=[(row["set"], row["copy"]) for row in base],
        base_us=math.exp(float(np.mean(list(reference.values())))),
        chosen_alike=frozenset(row["set"] for row in alike),
    )
