"""Figures of the recorded H200 sweeps, from their Parquet: `python -m benchmarks.recorded_h200`.

Measured on H200s by `python -m ray_jobs.run_sweep`; this module only reduces the rows. Cycles and rates are ratios
of sums over a configuration's blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb

from benchmarks.record import record

RECORDINGS = Path(__file__).parents[1] / "recordings"
SWEEPS = (
    "h200_kimi_mini_v1",
    "h200_kimi_mini_relaunch_v1",
    "h200_kimi_mini_pinned_v1",
    "h200_kimi_large_switch_v1",
    "h200_kimi_large_relaunch_v2",
    "h200_x2_nccl_v1",
    "h200_x2_search_v1",
)
CHAINS = {
    "miniature, switched, kernel caches cold": "h200_kimi_mini_v1",
    "miniature, switched, caches warm, pinned": "h200_kimi_mini_pinned_v1",
    "miniature, relaunched, caches warm": "h200_kimi_mini_relaunch_v1",
    "large, switched, pinned": "h200_kimi_large_switch_v1",
    "large, relaunched on another host, pinned": "h200_kimi_large_relaunch_v2",
}
"""Sweeps over steps 1, 2, 3, 5 at top-k 1."""

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
    from read_parquet($trials, union_by_name = true) t
        join read_parquet($blocks, union_by_name = true) b using (trial_id, attempt)
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
    from read_parquet($trials, union_by_name = true)
"""
_CHAIN = """
    select count(*) filter (relaunched) as launches, count(*) filter (not relaunched) as switches,
        sum(launch_s + weight_load_s + capture_s + stop_s) as boot_and_stop_s,
        sum(launch_s + weight_load_s) as boot_without_capture_s, sum(switch_s) as switch_s,
        sum(warmup_s + measure_s) as blocks_s,
        sum(launch_s + weight_load_s + capture_s + stop_s + switch_s + warmup_s + measure_s) as gpu_s_without_traces
    from read_parquet($trials, union_by_name = true) where eagle_topk = 1 and status in ('completed', 'pruned')
"""
_SETS = """
    select element_at(t.args, 'disable-custom-all-reduce')[1] = 'True' as nccl_reduces, t.nccl_set, t.num_steps,
        sum(b.decode_tokens) / sum(b.decode_s) as tok_s,
        sum(b.verify_ms * b.num_cycles) / sum(b.num_cycles) as verify_ms,
        sum(b.verify_forward_ms * b.num_cycles) / sum(b.num_cycles) as forward_ms,
        any_value(k.share) as communication_share_of_verify
    from read_parquet($trials, union_by_name = true) t
        join read_parquet($blocks, union_by_name = true) b using (trial_id, attempt)
        left join (
            select trial_id, sum(us_per_cycle) filter (kind = 'communication') / sum(us_per_cycle) as share
            from read_parquet($kernels, union_by_name = true) where phase = 'verify' group by trial_id
        ) k using (trial_id)
    where t.status = 'completed' group by all order by nccl_reduces, t.num_steps, forward_ms
"""

_CLOCKS = """
    with cycle as (
        select *, sum(coalesce(tokens, 0)) over (after_prefill) - coalesce(tokens, 0) as tokens_before,
            lead(cycle_index) over (after_prefill) is null as is_last, row_number() over (after_prefill) > 8 as settled
        from read_parquet($cycles, union_by_name = true) where rank = 0
        window after_prefill as (partition by trial_id, attempt, block_index order by cycle_index)
    ), block as (
        select trial_id,
            sum(cycle_ms) filter (tokens_before < decode_tokens) / 1000 / any_value(decode_s) as client,
            sum(c.cycle_ms) filter (not is_last) / (max(started_ms) - min(started_ms)) as starts,
            sum(c.cycle_ms) filter (settled and not is_last)
                / (max(started_ms) - min(started_ms) filter (settled)) as settled_starts,
            sum(c.draft_ms + c.verify_ms + c.extend_ms + c.gap_ms) / sum(c.cycle_ms) as phases
        from cycle c join (select * exclude (cycle_ms, draft_ms, verify_ms, extend_ms, gap_ms)
            from read_parquet($blocks, union_by_name = true)) b using (trial_id, attempt, block_index)
        where num_steps > 0
        group by trial_id, attempt, block_index
    ), trial as (
        select avg(client) as client, avg(starts) as starts, avg(settled_starts) as settled_starts,
            avg(phases) as phases from block group by trial_id
    )
    select count(*) as trials, avg(phases) as phases_and_gap_to_cycle, avg(client) as cycles_to_client_wall,
        max(abs(client - 1)) as client_wall_largest_difference, avg(starts) as cycles_to_host_starts,
        max(abs(starts - 1)) as host_starts_largest_difference,
        avg(settled_starts) as settled_cycles_to_host_starts,
        max(abs(settled_starts - 1)) as settled_largest_difference
    from trial
"""
"""Cycles as the probe recorded them (GPU events) over two other clocks: the client's, from the first to the last token
of the same cycles, and the host's, between their starts. These sweeps have one request at a time. With overlap
scheduling the host comes to run most of a cycle ahead within the first cycles, so its clock over a whole request is
short by that: `settled` leaves eight cycles out."""


def main() -> None:
    """Write `benchmarks/results/recorded_h200.json`."""
    figures: dict[str, Any] = {
        name: {**_rows(_LAUNCHES, name)[0], "configurations": _rows(_CONFIGURATIONS, name)} for name in SWEEPS
    }
    figures["h200_x2_nccl_v1"]["nccl sets"] = _rows(_SETS, "h200_x2_nccl_v1")
    figures["one launch or four: steps 1, 2, 3, 5"] = {
        title: {**_rows(_CHAIN, name)[0], "fastest_of_them": _fastest_chain(name)} for title, name in CHAINS.items()
    }
    figures["cycles against other clocks"] = {name: _rows(_CLOCKS, name)[0] for name in SWEEPS}
    print(record("recorded_h200", figures))


def _fastest_chain(sweep: str) -> str:
    labels = (str(row["configuration"]) for row in _rows(_CONFIGURATIONS, sweep))
    return next(label for label in labels if ", top-k 1," in label)


def _rows(query: str, sweep: str) -> list[dict[str, Any]]:
    """Rows of a query over one recorded sweep; numbers to four decimals."""
    names_of_tables = ("trials", "blocks", "cycles", "kernels")
    tables = {name: str(RECORDINGS / sweep / "tables" / name / "*.parquet") for name in names_of_tables}
    used = {name: path for name, path in tables.items() if f"${name}" in query}
    result = duckdb.execute(query, used)
    names = [column[0] for column in result.description]
    return [
        {name: round(value, 4) if isinstance(value, float) else value for name, value in zip(names, row, strict=True)}
        for row in result.fetchall()
    ]


if __name__ == "__main__":
    main()
