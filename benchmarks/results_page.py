"""Write `benchmarks/RESULTS.md` from the records in `benchmarks/results/`: `python -m benchmarks.results_page`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS

PAGE = Path(__file__).parent / "RESULTS.md"
_HEAD = """# Results

Made by `python -m benchmarks.results_page` from `results/*.json`; change the benchmarks, not this page. Each record
names its machine and date; figures of different records were taken under different load and are not to be compared.
"""
_ABOUT = {
    "overhead": """What the framework itself costs per trial, beside bare Ray Tune in the same run. Simulated engine, so
the engine's own seconds are near nothing; targets stand beside.""",
    "chaos": "Trials on the stub server with a random fault each, the driver killed in between: what was kept.",
    "recorded_h200": """Measured on one H200 (SGLang 0.5.17, a shrunk Kimi-K2.5 backbone, random weights), reduced here
from the recorded sweeps in `tests/assets/`; the machine in the next line only did the reducing. In the pinned sweep the
server simulates acceptance: its cycle times are measured, its rates are not.""",
    "search_cost": """GPU seconds until the incumbent is, and stays, within 1 % of the best configuration, by policy and
landscape. Virtual clock, simulated numbers.""",
}


def main() -> None:
    """Write the page."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    PAGE.write_text("\n".join([_HEAD, *(_section(record) for record in records)]), encoding="utf-8")
    print(PAGE)


def _section(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    where = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    lines = [f"## {record['benchmark']}", "", _ABOUT.get(record["benchmark"], ""), ""]
    lines += [f"`python -m benchmarks.{record['benchmark']}` on {record['date']}: {where}; {versions}.", ""]
    return "\n".join([*lines, *_blocks(record["figures"], depth=3)])


def _blocks(figures: Mapping[str, Any], *, depth: int) -> list[str]:
    """Plain values as one table, then everything nested under its own heading."""
    plain = {name: value for name, value in figures.items() if not _is_nested(value)}
    lines = _table(("figure", "value"), list(plain.items())) if plain else []
    for name, value in figures.items():
        if not _is_nested(value):
            continue
        lines += [f"{'#' * min(depth, 6)} {name}", ""]
        if isinstance(value, Mapping):
            lines += _blocks(value, depth=depth + 1)
        else:
            lines += _table(tuple(value[0]), [tuple(row.values()) for row in value])
    return lines


def _is_nested(value: object) -> bool:
    is_rows = (
        isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)
    )
    return isinstance(value, Mapping) or is_rows


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(map(_text, row)) + " |" for row in rows), ""]


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "/")


if __name__ == "__main__":
    main()
