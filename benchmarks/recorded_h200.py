"""Figures of the recorded H200 sweeps, from their Parquet: `python -m benchmarks.recorded_h200`.

Measured on one H200 by `python -m ray_jobs.run_sweep`; this module only reduces the rows. Cycles and rates are ratios
of sums over a configuration's blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb

from benchmarks.record import record

ASSETS = Path(__file__).parents[1] / "tests" / "assets"
SWEEPS = ("h200_kimi_mini_v1", "h200_kimi_mini_pinned_v1")

_CONFIGURATIONS = """
    select t.label as configuration, sum(b.decode_tokens) / sum(b.decode_s) as tok_s,
        sum(b.cycle_ms * b.num_cycles) / sum(b.num_cycles) as cycle_ms,
        sum(b.draft_ms * b.num_cycles) / sum(b.num_cycles) as draft_ms,
        sum(b.verify_ms * b.num_cycles) / sum(b.num_cycles) as verify_ms,
        sum(b.verify_forward_ms * b.num_cycles) / sum(b.num_cycles) as forward_ms,
        sum(b.extend_ms * b.num_cycles) / sum(b.num_cycles) as extend_ms,
        sum(b.gap_ms * b.num_cycles) / sum(b.num_cycles) as gap_ms,
        sum(b.accept_length * b.num_cycles) / sum(b.num_cycles) as accept_length,
        min(b.tok_s) as slowest_block_tok_s, max(b.tok_s) as fastest_block_tok_s, count(*) as blocks
    from read_parquet($trials) t join read_parquet($blocks) b using (trial_id, attempt)
    where t.status in ('completed', 'pruned') group by t.label order by tok_s desc
"""
_LAUNCHES = """
    select any_value(machine) as machine, any_value(engine_version) as sglang,
        strftime(min(started_at), '%Y-%m-%d') as measured_on,
        count(*) filter (relaunched and status in ('completed', 'pruned')) as launches,
        median(launch_s + weight_load_s + capture_s) filter (relaunched and status in ('completed', 'pruned'))
            as launch_median_s,
        max(launch_s + weight_load_s + capture_s) as launch_slowest_s,
        count(*) filter (not relaunched) as switches, median(switch_s) filter (not relaunched) as switch_median_s,
        median(measure_s) filter (status = 'completed') as measure_median_s,
        median(trace_s) filter (status = 'completed') as trace_median_s
    from read_parquet($trials)
"""


def main() -> None:
    """Write `benchmarks/results/recorded_h200.json`."""
    figures = {name: {**_rows(_LAUNCHES, name)[0], "configurations": _rows(_CONFIGURATIONS, name)} for name in SWEEPS}
    print(record("recorded_h200", figures))


def _rows(query: str, sweep: str) -> list[dict[str, Any]]:
    """Rows of a query over one recorded sweep; numbers to three decimals."""
    tables = {name: str(ASSETS / sweep / "tables" / name / "*.parquet") for name in ("trials", "blocks")}
    used = {name: path for name, path in tables.items() if f"${name}" in query}
    result = duckdb.execute(query, used)
    names = [column[0] for column in result.description]
    return [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in zip(names, row, strict=True)}
        for row in result.fetchall()
    ]


if __name__ == "__main__":
    main()
