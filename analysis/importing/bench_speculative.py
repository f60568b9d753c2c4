"""SGLang's `scripts/playground/bench_speculative.py`: one JSON object a line, one launch each."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.importing.json_rows import Row, holds
from analysis.importing.records import Drafting, ForeignBlock, ForeignRun, Reading, check_share, count, length, positive

FORMAT = "bench_speculative JSONL"
THROUGHPUT = "accept length / step time of bench_speculative, per request"
_KEYS = ("batch_size", "steps", "topk", "num_draft_tokens", "acc_length", "step_time")


def is_bench_speculative(row: Row) -> bool:
    """Whether a row is one of this script."""
    return holds(row, _KEYS)


def read_bench_speculative(rows: Sequence[tuple[int, Row]], broken: int, *, source: str) -> Reading:
    """Read the rows; steps 0 is the server without speculation. Raises ImportFileError if too many are not known."""
    runs = []
    for line, row in rows:
        run = _run(row, f"{source}:{line}")
        if run is None:
            broken += 1
        else:
            runs.append(run)
    check_share(broken, len(runs) + broken, what="rows of bench_speculative")
    note = "step times are the 20 % quantile of each batch size, so rates are near the best, not the mean"
    return Reading(source=source, format=FORMAT, runs=tuple(runs), understood=len(runs), unparsed=broken, notes=(note,))


def _run(row: Row, origin: str) -> ForeignRun | None:
    if not is_bench_speculative(row):
        return None
    batch, steps, topk, draft = (count(row[name]) for name in ("batch_size", "steps", "topk", "num_draft_tokens"))
    step_s, accepted = positive(row["step_time"]), length(row["acc_length"])
    if not batch or steps is None or step_s is None or accepted is None:
        return None
    rate = positive(batch * accepted / step_s)
    if rate is None:
        return None
    tokens = positive(row.get("completion_tokens"))
    model = row.get("model_path")
    return ForeignRun(
        origin=origin,
        throughput=THROUGHPUT,
        drafting=Drafting(
            speculates=steps > 0,
            num_steps=steps or None,
            eagle_topk=topk or None,
            num_draft_tokens=draft or None,
        ),
        blocks=(
            ForeignBlock(
                concurrency=batch,
                tok_s=rate,
                decode_s=(tokens * batch if tokens is not None else accepted * batch) / rate,
                accept_length=accepted if steps else None,
                cycle_ms=1000.0 * step_s,
            ),
        ),
        accept_length=accepted if steps else None,
        model=model.rstrip("/").rpartition("/")[2] if isinstance(model, str) else None,
    )
