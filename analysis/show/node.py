"""A predicted node in markdown and as JSON, with everything that the prediction assumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from analysis.data.load import Results
from analysis.judge.node import Latency, NodeRate, Shape


def node_markdown(results: Results, rates: Sequence[NodeRate], latency: Latency, shape: Shape, num_gpus: int) -> str:
    """A table by step count, then the assumptions."""
    plain = next((rate for rate in rates if rate.num_steps == 0), None)
    rows = ["| steps | accept length | share ms | collectives | communication ms | cycle ms | tok/s | 95 % | pays |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for rate in rates:
        low, high = rate.communication_ms
        cells = (
            str(rate.num_steps) if rate.num_steps else "none",
            f"{rate.accept_length:.2f}" if rate.num_steps else "",
            f"{rate.share_cycle_ms:.2f}",
            str(rate.collectives),
            f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}",
            f"{rate.cycle_ms:.2f}",
            f"{rate.tok_s:.1f}",
            f"{rate.interval[0]:.1f} to {rate.interval[1]:.1f}",
            "" if plain is None or not rate.num_steps else f"{rate.tok_s / plain.tok_s - 1:+.1%}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    said = (
        f"Predicted for {num_gpus} GPUs from {results.sweep_id} ({results.engine}). "
        "Nothing here was measured on such a node.",
        *assumptions(results, latency, shape),
    )
    return "\n".join([said[0], "", *rows, "", "Assumed:", "", *(f"- {line}" for line in said[1:]), ""])


def node_document(results: Results, rates: Sequence[NodeRate], latency: Latency, shape: Shape) -> dict[str, Any]:
    """Plain values only."""
    return {
        "sweep_id": results.sweep_id,
        "engine": results.engine,
        "predicted": [asdict(rate) for rate in rates],
        "assumptions": list(assumptions(results, latency, shape)),
    }


def assumptions(results: Results, latency: Latency, shape: Shape) -> tuple[str, ...]:
    """One sentence each."""
    return (
        "the recorded model holds the share of one GPU of the node: heads, experts and vocabulary divided, depth and "
        "width whole",
        f"a forward of {shape.layers} layers has {shape.forward_collectives} collective operations, a drafter's "
        "forward 4, counted in a trace of SGLang 0.5.17",
        f"one of them takes {latency.source}; an all-gather as long as an all-reduce",
        "GPUs do not wait for each other beyond that, and no kernel runs beside communication",
        "prompts and context are as long as recorded; accept lengths do not depend on the node",
        *(("the recorded throughput was simulated",) if results.simulated else ()),
    )
