"""Eight H200 predicted from one GPU's share, against what is published: `python -m benchmarks.predict_node`.

Nobody has published the throughput of Kimi-K2.5 with EAGLE-3 on this node. Without speculation one figure is published:
106.1 tok/s (SGLang cookbook, SGLang 0.5.6, prompts of 1,000 and answers of 1,000 tokens, one request at a time).
"""

from __future__ import annotations

from pathlib import Path

from analysis.data.load import load
from analysis.judge.node import NodeRate, Shape, predict_node
from analysis.judge.verdict import verdict
from analysis.predict_command import stated_latency
from benchmarks.record import record

SHARE = Path(__file__).parents[1] / "recordings" / "kimi_k25_one_of_eight_h200_v1"
KIMI = Shape(layers=61, hidden=7168)
ALL_REDUCE_US = [8.0, 13.5]
"""8: the custom kernel, as assumed in `sweeps/machines/h200-nvlink-x8.yaml`. 13.5: NCCL in a CUDA graph on two H200,
the slowest default at up to 6 tokens (`recordings/nccl_allreduce_h200_x2`). Eight ranks have not been timed."""
ACCEPT_LENGTHS = {1: 1.83, 2: 2.43, 3: 2.88, 4: 3.24, 5: 3.46}
"""Published: InferenceX golden_al_distribution/kimik2.5_eagle3.yaml, SPEED-Bench coding, thinking on."""
PUBLISHED_TOK_S = 106.1
"""Published: SGLang cookbook, Kimi-K2.5 on 8 H200 without speculation."""


def main() -> None:
    """Predict, compare, record."""
    results = load(SHARE)
    rates = predict_node(
        results,
        verdict(results),
        shape=KIMI,
        latency=stated_latency(ALL_REDUCE_US),
        accept_lengths=ACCEPT_LENGTHS,
    )
    plain = rates[0]
    figures = {
        "by_step_count": {_name(rate): _row(rate, plain) for rate in rates},
        "against_published": {
            "published_tok_s": PUBLISHED_TOK_S,
            "predicted_tok_s": plain.tok_s,
            "predicted_interval": list(plain.interval),
            "unexplained_ms_per_token": 1000 / PUBLISHED_TOK_S - plain.cycle_ms,
            "all_reduce_us_that_would_explain_it": 1000
            * (1000 / PUBLISHED_TOK_S - plain.share_cycle_ms)
            / plain.collectives,
        },
    }
    print(record("predict_node", figures))


def _name(rate: NodeRate) -> str:
    return f"{rate.num_steps} steps" if rate.num_steps else "no speculation"


def _row(rate: NodeRate, plain: NodeRate) -> dict[str, object]:
    return {
        "accept_length": rate.accept_length,
        "share_cycle_ms": rate.share_cycle_ms,
        "communication_ms": list(rate.communication_ms),
        "tok_s": rate.tok_s,
        "interval_95": list(rate.interval),
        "against_no_speculation": rate.tok_s / plain.tok_s - 1,
    }


if __name__ == "__main__":
    main()
