"""`sglang.bench_serving` JSONL and vLLM's benchmark JSON: whole requests as a client sees them, prefill included."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.importing.json_rows import Row, holds
from analysis.importing.records import (
    MOST_AT_ONCE,
    Drafting,
    Event,
    ForeignBlock,
    ForeignRun,
    Reading,
    check_share,
    count,
    length,
    number,
    positive,
)

SGLANG, VLLM = "sglang.bench_serving JSONL", "vLLM benchmark JSON"
THROUGHPUT = "output tokens per second of a client's run, prefill included"
_BOTH = ("duration", "completed", "output_throughput", "total_output_tokens")
_TIMES = ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms")
_WORKLOAD = ("backend", "dataset_name", "random_input_len", "random_output_len", "sharegpt_output_len", "request_rate")


def is_sglang(row: Row) -> bool:
    """Whether a row is one of `sglang.bench_serving`."""
    return holds(row, _BOTH) and not is_vllm(row) and ("accept_length" in row or "max_concurrency" in row)


def is_vllm(row: Row) -> bool:
    """Whether a row is a result of `vllm bench serve`."""
    return holds(row, _BOTH) and ("model_id" in row or "total_token_throughput" in row or "endpoint_type" in row)


def read_client_benchmark(rows: Sequence[tuple[int, Row]], broken: int, *, source: str, format: str) -> Reading:
    """Read rows of one of the two formats. Raises ImportFileError if too many are in no known form."""
    runs = []
    for line, row in rows:
        run = _run(row, origin=f"{source}:{line}" if len(rows) > 1 else source, vllm=format == VLLM)
        if run is None:
            broken += 1
        else:
            runs.append(run)
    check_share(broken, len(runs) + broken, what="rows of a benchmark")
    return Reading(
        source=source,
        format=format,
        runs=tuple(runs),
        understood=len(runs),
        unparsed=broken,
        notes=("throughput covers whole requests, so it is below the decode throughput",),
    )


def _run(row: Row, *, origin: str, vllm: bool) -> ForeignRun | None:
    rate, seconds, completed = positive(row["output_throughput"]), positive(row["duration"]), count(row["completed"])
    if rate is None or seconds is None or not completed:
        return None
    accepted = length(row.get("spec_decode_acceptance_length" if vllm else "accept_length"))
    asked = positive(row.get("max_concurrency")) or positive(row.get("concurrency"))
    concurrency = min(max(1, round(asked)) if asked is not None else completed, MOST_AT_ONCE)
    steps = count(row.get("speculative_num_steps") or row.get("num_speculative_tokens"))
    times = ", ".join(f"{name} {value:g}" for name in _TIMES if (value := number(row.get(name))) is not None)
    return ForeignRun(
        origin=origin,
        throughput=THROUGHPUT,
        drafting=Drafting(speculates=None if accepted is None and not steps else True, num_steps=steps),
        settings={name: str(row[name]) for name in _WORKLOAD if isinstance(row.get(name), str | int | float)},
        blocks=(ForeignBlock(concurrency=concurrency, tok_s=rate, decode_s=seconds, accept_length=accepted),),
        accept_length=accepted,
        model=_name(row.get("model_id") or row.get("model")),
        events=(Event(name="latency", detail=times),) if times else (),
    )


def _name(value: object) -> str | None:
    return value.rstrip("/").rpartition("/")[2] or None if isinstance(value, str) else None
