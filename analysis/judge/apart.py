"""What two compared configurations differ in besides drafting and NCCL: arguments, and what their servers resolved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from analysis.data.load import Results
from sweeps.results.resolved import EXPECTED_TO_DIFFER, RESOLVED

_MOST = 60
"""Characters of a value that are shown."""


def apart(results: Results, speculative: str, plain: str) -> str | None:
    """A sentence part about two configurations, by id; None if they differ in drafting and NCCL alone."""
    sides = [_told(results, key) for key in (speculative, plain)]
    parts = list(_differences(*sides))
    return (
        f"the two also differ in {', '.join(parts)}, so the difference is not of speculation alone" if parts else None
    )


def _differences(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*first, *second}):
        with_drafts, without = first.get(name, "not set"), second.get(name, "not set")
        if with_drafts != without and ((name in first and name in second) or "resolved" not in name):
            yield f"{name} ({with_drafts[:_MOST]} with speculation, {without[:_MOST]} without)"


def _told(results: Results, configuration_id: str) -> dict[str, str]:
    """Arguments and variables that were asked for, and what the newest server said that it resolved."""
    rows = results.trials.filter(results.trials["configuration_id"] == configuration_id)
    newest: dict[str, Any] = rows.sort("started_s").row(-1, named=True)
    asked = {name: str(value) for name, value in dict(newest["args"] or {}).items()}
    asked |= {name: str(value) for name, value in dict(newest["env"] or {}).items()}
    swept = {name.replace("-", "_") for name in asked}
    resolved = {
        f"{name} as resolved by the server": str(value)
        for name, value in dict(newest.get("effective") or {}).items()
        if name in RESOLVED and name not in EXPECTED_TO_DIFFER and name not in swept
    }
    return asked | resolved
