"""Configurations as points of the searched space, and pairs of them that differ in one dimension alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.data.load import Results
from sweeps.results.tables import DRAFTING_COLUMNS

_UNSET = "unset"
_TREE = frozenset(DRAFTING_COLUMNS) - {"drafter"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One configuration that has valid blocks, dimension by dimension."""

    configuration_id: str
    label: str
    speculates: bool
    settings: Mapping[str, str | None]


def points(results: Results) -> tuple[Point, ...]:
    """Every configuration with valid blocks, in the order of its first trial."""
    first = results.trials.unique("configuration_id", keep="first", maintain_order=True)
    return tuple(_point(row) for row in first.iter_rows(named=True))


def draft_tokens_are_derived(everything: Sequence[Point]) -> bool:
    """Whether steps and top-k alone decide the number of draft tokens in this sweep."""
    drafting = [point.settings for point in everything if point.speculates]
    chains = {(each["num_steps"], each["eagle_topk"]) for each in drafting}
    return len({(each["num_steps"], each["eagle_topk"], each["num_draft_tokens"]) for each in drafting}) == len(chains)


def step_chain(everything: Sequence[Point], like: Point) -> list[Point]:
    """The chains (top-k 1) that share everything with `like` but their step count and tree."""
    rest = {name: value for name, value in like.settings.items() if name not in _TREE}
    return [
        point
        for point in everything
        if point.settings["eagle_topk"] == "1" and rest.items() <= point.settings.items() and point.speculates
    ]


def control_settings(results: Results) -> Mapping[str, str | None]:
    """Of the first control; nothing without one."""
    controls = results.trials.filter(pl.col("role") == "control")
    return _point(controls.row(0, named=True)).settings if controls.height else {}


def varying(
    everything: Sequence[Point], control: Mapping[str, str | None]
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(dimension, reference value, further values): the control's value, or the smallest that speculates."""
    names = list(dict.fromkeys(name for point in everything for name in point.settings))
    for name in names:
        values = list(dict.fromkeys(_value(point, name) for point in everything if _applies(point, name)))
        if name in _TREE:
            values.sort(key=lambda value: -1 if value == _UNSET else int(value))
        if name == "num_draft_tokens" and draft_tokens_are_derived(everything):
            continue
        wanted = control.get(name) or _UNSET
        reference = wanted if wanted in values else next(iter(values), None)
        if reference is not None and len(values) > 1:
            yield name, reference, tuple(value for value in values if value != reference)


def _applies(point: Point, dimension: str) -> bool:
    """Whether a point has a value of its own; without speculation there is no drafter and no tree."""
    return point.speculates or dimension not in DRAFTING_COLUMNS


def _value(point: Point, dimension: str) -> str:
    return point.settings.get(dimension) or _UNSET


def pairs_of(everything: Sequence[Point], dimension: str, reference: str, value: str) -> list[tuple[Point, Point]]:
    """Points with `value`, each with every point that has `reference` and all other settings alike."""
    usable = [point for point in everything if _applies(point, dimension)]
    derived = draft_tokens_are_derived(everything)
    references: dict[tuple[object, ...], list[Point]] = defaultdict(list)
    for point in usable:
        if _value(point, dimension) == reference:
            references[_rest(point, dimension, derived=derived)].append(point)
    return [
        (point, partner)
        for point in usable
        if _value(point, dimension) == value
        for partner in references[_rest(point, dimension, derived=derived)]
    ]


def _rest(point: Point, dimension: str, *, derived: bool) -> tuple[object, ...]:
    """All other settings: equal for configurations that differ in `dimension` only."""
    free = {dimension}
    if derived or dimension == "eagle_topk" or point.settings.get("eagle_topk") == "1":
        free.add("num_draft_tokens")
    return tuple(sorted((name, value or _UNSET) for name, value in point.settings.items() if name not in free))


def _point(row: Mapping[str, Any]) -> Point:
    return Point(
        configuration_id=row["configuration_id"],
        label=row["label"],
        speculates=bool(row["num_steps"]),
        settings={
            **{name: None if row[name] is None else str(row[name]) for name in DRAFTING_COLUMNS},
            "nccl": row["nccl_set"],
            **{f"args.{name}": value for name, value in dict(row["args"] or {}).items()},
            **{f"env.{name}": value for name, value in dict(row["env"] or {}).items()},
        },
    )
