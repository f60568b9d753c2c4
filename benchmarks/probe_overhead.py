"""What the cycle probe costs: `python -m benchmarks.probe_overhead SPEC [--requests N] [--name NAME]`.

One server, the spec's first speculative configuration. Requests come in fours, probe on, off, off, on, each four with
one prompt, so that a slow drift of the server falls on both alike. The figure is the ratio of decode throughput, on to
off, with a 95 % t interval over the fours (logarithms). Beside it: how far the recorded cycles add up to the client's
wall time (with overlap scheduling, a request's last cycle comes after its last token).
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from scipy import stats

from benchmarks.record import record
from sweeps.engines.sglang import SGLangEngine
from sweeps.space import Configuration, Space
from sweeps.spec import SweepSpec, read_spec
from sweeps.workload import Block, plan_blocks

ORDER = (True, False, False, True)
"""Probe on or off within one four."""
WARMUP_FOURS = 3
SUM_BLOCKS = 10


def main() -> None:
    """Measure, print, record."""
    arguments = _arguments()
    spec = read_spec(arguments.spec)
    with tempfile.TemporaryDirectory() as folder:
        engine = SGLangEngine(spec, logs=Path(folder))
        try:
            figures = _measure(engine, spec, num_fours=math.ceil(arguments.requests / 2))
        finally:
            engine.close()
    print(record(arguments.name, figures))
    for name, value in figures.items():
        print(f"{name}: {value}")


def _measure(engine: SGLangEngine, spec: SweepSpec, *, num_fours: int) -> dict[str, object]:
    configuration = _configuration(spec)
    report = engine.launch(configuration)
    blocks = _single_requests(spec)
    for block in itertools.islice(itertools.cycle(blocks), WARMUP_FOURS * len(ORDER)):
        engine.generate(block)
    fours = [_four(engine, block) for block in itertools.islice(itertools.cycle(blocks), num_fours)]
    engine.record_cycles(on=True)
    return {
        "engine": f"SGLang {report.version}",
        "machine": report.machine,
        "configuration": configuration.label,
        "requests_each": 2 * num_fours,
        "output_tokens": spec.workload.output_tokens,
        **_ratio(np.array(fours)),
        **_sums(engine, blocks[:SUM_BLOCKS]),
    }


def _configuration(spec: SweepSpec) -> Configuration:
    return next(each for each in Space(spec).configurations() if each.speculates)


def _single_requests(spec: SweepSpec) -> list[Block]:
    """One block a prompt, at concurrency 1."""
    planned = plan_blocks(spec.workload, folder=Path.cwd())
    prompts = [prompt for block in planned for prompt in block.prompts]
    return [replace(planned[-1], index=number, prompts=(each,), concurrency=1) for number, each in enumerate(prompts)]


def _four(engine: SGLangEngine, block: Block) -> tuple[float, float]:
    """Logarithm of the decode rate with the probe on and off, each the mean of two requests."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for is_on in ORDER:
        engine.record_cycles(on=is_on)
        load = engine.generate(block)
        rates[is_on].append(math.log(load.decode_tokens / load.decode_s))
    return float(np.mean(rates[True])), float(np.mean(rates[False]))


def _ratio(fours: np.ndarray) -> dict[str, object]:
    differences = fours[:, 0] - fours[:, 1]
    interval = stats.t.interval(0.95, len(differences) - 1, loc=differences.mean(), scale=stats.sem(differences))
    return {
        "tok_s_probe_off": float(np.exp(fours[:, 1].mean())),
        "ratio_on_to_off": float(np.exp(differences.mean())),
        "interval_95": [float(np.exp(bound)) for bound in interval],
        "spread_of_one_four": float(differences.std(ddof=1)),
    }


def _sums(engine: SGLangEngine, blocks: list[Block]) -> dict[str, object]:
    """Cycles as recorded against wall time as the client saw it, from the first to the last token."""
    cycle_s, wall_s, means = 0.0, 0.0, []
    for block in blocks:
        result = engine.run_block(block)
        own = result.cycles.filter(pc.equal(result.cycles["rank"], 0))
        cycle_s += pc.sum(own["cycle_ms"]).as_py() / 1000.0
        wall_s += result.decode_s
        means.append(pc.mean(own["cycle_ms"]).as_py())
    return {"cycle_mean_ms": float(np.mean(means)), "cycles_to_wall": cycle_s / wall_s}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe_overhead", description="Cost of the cycle probe.")
    parser.add_argument("spec", type=Path, metavar="SPEC")
    parser.add_argument("--requests", type=int, default=200, help="requests with the probe on, and as many with it off")
    parser.add_argument("--name", default="probe_overhead", help="name of the record")
    return parser.parse_args()


if __name__ == "__main__":
    main()
