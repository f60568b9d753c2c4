"""Sides: every configuration with its throughput, its difference to the control, and how to launch it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import polars as pl

from analysis.data.load import Results
from analysis.judge.claims import Effect, judge
from analysis.judge.effects import Level, compare_all, level, levels
from analysis.judge.fitted import Fitted
from analysis.judge.points import Point
from sweeps.redaction import shell_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One configuration, its throughput and how to launch it."""

    configuration_id: str
    label: str
    speculates: bool
    num_steps: int
    role: Literal["control", "candidate"]
    pruned: bool
    """Stopped early in every one of its trials: not eligible as best."""
    tok_s: float
    interval: tuple[float, float] | None
    interval_covers: str
    num_launches: int
    num_blocks: int
    against_control: Effect | None
    launch_command: str
    environment: Mapping[str, str]


def sides_of(results: Results, everything: Sequence[Point], throughput: Fitted) -> tuple[Side, ...]:
    """Every configuration with a model, fastest first; the fastest of each kind has a wider interval for its choice."""
    return _widened(_all_sides(results, everything, throughput), throughput)


def fastest(sides: Sequence[Side], *, speculates: bool) -> Side | None:
    """Of those that ran to their end; if all were pruned, of those."""
    group = sorted((side for side in sides if side.speculates == speculates), key=lambda side: side.pruned)
    return next(iter(group), None)


def _all_sides(results: Results, everything: Sequence[Point], throughput: Fitted) -> tuple[Side, ...]:
    controls = set(results.trials.filter(pl.col("role") == "control")["configuration_id"])
    reference = next(iter(sorted(controls)), None)
    keys = [point.configuration_id for point in everything]
    reached = dict(zip(keys, levels(throughput, keys), strict=True))
    others = [key for key in keys if key != reference]
    against: dict[str, Effect] = {}
    if reference is not None:
        found = compare_all(throughput, [{key: 1.0, reference: -1.0} for key in others])
        compared = {key: effect for key, effect in zip(others, found, strict=True) if effect is not None}
        against = dict(zip(compared, judge(list(compared.values())), strict=True))
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in results.trials.sort("started_s").iter_rows(named=True):
        rows[row["configuration_id"]].append(row)
    sides = [
        _side(rows[point.configuration_id], point, own, against.get(point.configuration_id), controls)
        for point in everything
        if (own := reached[point.configuration_id]) is not None
    ]
    return tuple(sorted(sides, key=lambda side: -side.tok_s))


def _widened(sides: Sequence[Side], throughput: Fitted) -> tuple[Side, ...]:
    """The fastest of each kind was chosen by these same measurements: the lower end of its interval is moved out."""
    chosen = {}
    for speculates in (False, True):
        group = [side for side in sides if side.speculates == speculates and not side.pruned]
        if len(group) > 1:
            chosen[group[0].configuration_id] = len(group)
    moved = {
        key: reached.interval
        for key, among in chosen.items()
        if (reached := level(throughput, key, selected_among=among)) is not None
    }
    return tuple(
        replace(side, interval=moved[side.configuration_id]) if side.configuration_id in moved else side
        for side in sides
    )


def _side(
    rows: Sequence[Mapping[str, Any]], point: Point, reached: Level, against: Effect | None, controls: set[str]
) -> Side:
    newest = rows[-1]
    environment = dict(newest["environment"] or {})
    return Side(
        configuration_id=point.configuration_id,
        label=point.label,
        speculates=point.speculates,
        num_steps=int(point.settings["num_steps"] or 0),
        role="control" if point.configuration_id in controls else "candidate",
        pruned=all(row["status"] == "pruned" for row in rows),
        tok_s=reached.value,
        interval=reached.interval,
        interval_covers=reached.covers,
        num_launches=reached.num_launches,
        num_blocks=reached.num_blocks,
        against_control=against,
        launch_command=_command(newest, environment),
        environment=environment,
    )


def _command(row: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """For a shell: variables taken out for good, variables set, every flag."""
    removed = [part for name in row["removed_env"] or () if name not in environment for part in ("-u", name)]
    settings = [f"{name}={value}" for name, value in sorted(environment.items())]
    prefix = ["env", *removed, *settings] if removed or settings else []
    return shell_line([*prefix, *(row["command"] or ())])
