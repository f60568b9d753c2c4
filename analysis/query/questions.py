"""Questions that people ask of a results folder, each with its query. `docs/tables.md` shows them, tests run them."""

from __future__ import annotations

QUESTIONS: tuple[tuple[str, str], ...] = (
    (
        "Which configuration was fastest, and how many blocks say so?",
        """SELECT t.label, sum(b.decode_tokens) / sum(b.decode_s) AS tok_s, count(*) AS blocks
FROM trials t JOIN blocks b USING (trial_id, attempt)
WHERE t.status = 'completed' AND b.suspect IS NULL
GROUP BY t.label ORDER BY tok_s DESC LIMIT 10""",
    ),
    (
        "Where does a cycle go, by step count?",
        """SELECT t.num_steps, avg(b.draft_ms) AS draft_ms, avg(b.verify_ms) AS verify_ms,
       avg(b.extend_ms) AS extend_ms, avg(b.gap_ms) AS gap_ms,
       avg(b.cycle_ms) AS cycle_ms, avg(b.accept_length) AS accept_length
FROM trials t JOIN blocks b USING (trial_id, attempt)
WHERE b.suspect IS NULL GROUP BY t.num_steps ORDER BY t.num_steps""",
    ),
    (
        "What failed, at which stage, and how?",
        """SELECT status, stage, kind, count(*) AS trials, any_value(reason) AS for_example
FROM trials WHERE status IN ('failed', 'invalid') GROUP BY ALL ORDER BY trials DESC""",
    ),
    (
        "Where did the GPU hours go?",
        """SELECT sum(launch_s * num_gpus) / 3600 AS launch, sum(weight_load_s * num_gpus) / 3600 AS weight_load,
       sum(capture_s * num_gpus) / 3600 AS capture, sum((warmup_s + measure_s) * num_gpus) / 3600 AS measuring,
       sum((ended_s - started_s) * num_gpus) / 3600 AS all_of_it
FROM trials""",
    ),
    (
        "How long are the slowest cycles, beside the usual ones?",
        """SELECT trial_id, median(cycle_ms) AS p50, quantile_cont(cycle_ms, 0.99) AS p99, max(cycle_ms) AS longest
FROM cycles WHERE rank = 0 GROUP BY trial_id ORDER BY p99 / p50 DESC LIMIT 10""",
    ),
    (
        "Which settings did not take effect, and why?",
        """SELECT setting, requested, effective, grade, any_value(detail) AS why, count(*) AS rows
FROM evidence WHERE grade IN ('overridden', 'not_seen', 'not_exercised') GROUP BY ALL ORDER BY rows DESC, setting""",
    ),
    (
        "What has somebody else set in the servers?",
        """SELECT DISTINCT setting, coalesce(effective, seen) AS value, detail FROM evidence WHERE grade = 'extra'
ORDER BY setting""",
    ),
    (
        "Which kernels does a verify spend its time in?",
        """SELECT kind, kernel, avg(us_per_cycle) / 1000 AS ms, avg(calls_per_cycle) AS calls
FROM kernels WHERE phase = 'verify' GROUP BY kind, kernel ORDER BY ms DESC LIMIT 10""",
    ),
    (
        "How long does a user wait for the first token?",
        """SELECT t.label, r.concurrency, median(r.ttft_ms) AS p50_ms, quantile_cont(r.ttft_ms, 0.99) AS p99_ms
FROM requests r JOIN trials t USING (trial_id, attempt)
WHERE r.ttft_ms IS NOT NULL GROUP BY ALL ORDER BY p99_ms DESC LIMIT 10""",
    ),
    (
        "Did the control change while the sweep ran?",
        """SELECT t.trial_id, t.node, t.started_s, sum(b.decode_tokens) / sum(b.decode_s) AS tok_s
FROM trials t JOIN blocks b USING (trial_id, attempt)
WHERE t.role = 'control' AND b.suspect IS NULL GROUP BY ALL ORDER BY t.started_s""",
    ),
)
"""(question, query)."""
