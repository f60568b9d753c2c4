"""Short names for configurations: only the settings that tell them apart."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.judge.points import Point, draft_tokens_are_derived
from sweeps.results.tables import DRAFTING_COLUMNS

_SHORT = {"num_steps": "steps {}", "eagle_topk": "top-k {}", "num_draft_tokens": "{} draft tokens", "nccl": "nccl {}"}


def short_names(points: Sequence[Point]) -> dict[str, str]:
    """Configuration id -> the settings that tell it from the others; unique."""
    drafting = [point for point in points if point.speculates]
    varying = {
        name
        for name in dict.fromkeys(name for point in points for name in point.settings)
        if len({point.settings.get(name) for point in (drafting if name in DRAFTING_COLUMNS else points)}) > 1
    }
    if draft_tokens_are_derived(points):
        varying.discard("num_draft_tokens")
    names = {point.configuration_id: _short_name(point, varying) for point in points}
    taken = list(names.values())
    return {key: name if taken.count(name) == 1 else f"{name} ({key})" for key, name in names.items()}


def _short_name(point: Point, varying: set[str]) -> str:
    parts = [f"steps {point.settings['num_steps']}"] if point.speculates else ["no speculation"]
    for name, value in point.settings.items():
        if name == "num_steps" or name not in varying or (name in DRAFTING_COLUMNS and not point.speculates):
            continue
        if name == "num_draft_tokens" and point.settings.get("eagle_topk") == "1":
            continue
        parts.append(_SHORT.get(name, name.partition(".")[2] + " {}").format(value if value is not None else "unset"))
    return ", ".join(part.strip() for part in parts)
