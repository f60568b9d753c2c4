"""What is recorded of the scenes, and the tables that show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.verdict_scenes.scenes import GOALS, Goal, Scene
from benchmarks.verdict_scenes.score import Figure

Table = tuple[tuple[str, ...], list[tuple[object, ...]]]

_CLAIMS = (
    "false NCCL effects",
    "false steps and top-k",
    "false against the control",
    "called equivalent",
    "found",
    "oracle found",
    "pays wrong",
    "pays decided",
    "pays denied",
    "outlier named",
)
_INTERVALS = (
    "NCCL effects",
    "steps and top-k",
    "phases",
    "against control",
    "levels",
    "the best level",
    "best against best",
    "break-even",
    "needed accuracy",
)
_FLAWS = {"met": "", "missed": ", missed", "missed by less than two errors": ", missed within error"}


def kept(scene: Scene, figures: Mapping[str, Figure]) -> dict[str, dict[str, object]]:
    """Everything that the page shows of a scene: percent, two standard errors, and whether the goal was reached."""
    found: dict[str, dict[str, object]] = {}
    for name in (*_CLAIMS, *(f"{each} {what}" for each in _INTERVALS for what in ("covered", "without interval"))):
        if name in figures:
            figure, goal = figures[name], scene.goal(name)
            found[name] = {"percent": 100 * figure.value, "two_errors": 200 * figure.error}
            found[name] |= {} if goal is None else {"said": goal.said(figure.value, figure.error)}
            if name in scene.goals:
                found[name]["goal"] = str(scene.goals[name])
    widths = {f"{name} width": figures[f"{name} width"] for name in _INTERVALS if f"{name} width" in figures}
    return found | {name: {"percent": figure.value} for name, figure in widths.items()}


def tables(scenes: Mapping[str, Mapping[str, Any]]) -> dict[str, Table]:
    """By title: what was claimed, what intervals covered, and what was missed."""
    claims: list[tuple[object, ...]] = [
        (name, found["sweeps"], round(found["core_s"]), *(_cell(found.get(each)) for each in _CLAIMS))
        for name, found in scenes.items()
    ]
    covered: list[tuple[object, ...]] = [
        (name, *(_interval(found, each) for each in _INTERVALS)) for name, found in scenes.items()
    ]
    return {
        "Claims, in percent of sweeps": (("scene", "sweeps", "core s", *(_head(each) for each in _CLAIMS)), claims),
        "Intervals: percent that cover the truth (mean width in percent)": (
            ("scene", *(_head(each, f"{each} covered") for each in _INTERVALS)),
            covered,
        ),
        "Goals": (("figure", "scenes with it", "met", "missed within error", "missed"), _counts(scenes)),
    }


def _head(shown: str, figure: str | None = None) -> str:
    goal: Goal | None = GOALS.get(figure or shown)
    return shown if goal is None else f"{shown} ({goal})"


def _cell(found: Mapping[str, Any] | None) -> str | None:
    if found is None:
        return None
    shown = f"{found['percent']:.1f} ± {found['two_errors']:.1f}"
    wanted = f" ({found['goal']})" if "goal" in found else ""
    flaw = _FLAWS[found.get("said", "met")]
    return f"**{shown}**{wanted}{flaw}" if flaw == ", missed" else f"{shown}{wanted}{flaw}"


def _interval(found: Mapping[str, Any], name: str) -> str | None:
    if f"{name} without interval" in found:
        return f"**none in {found[f'{name} without interval']['percent']:.0f} %**, missed"
    shown = _cell(found.get(f"{name} covered"))
    return None if shown is None else f"{shown} (width {found[f'{name} width']['percent']:.3g})"


def _counts(scenes: Mapping[str, Mapping[str, Any]]) -> list[tuple[object, ...]]:
    said: dict[str, list[str]] = {}
    for found in scenes.values():
        for name, figure in found.items():
            if isinstance(figure, Mapping) and "said" in figure:
                said.setdefault(name, []).append(figure["said"])
    return [(name, len(words), *(words.count(word) for word in _ORDER)) for name, words in said.items()]


_ORDER = ("met", "missed by less than two errors", "missed")
