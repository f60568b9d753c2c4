"""What the cycle probe costs, and whether it is right: `python -m benchmarks.probe_overhead SPEC [--requests N]`.

One server, the spec's first speculative configuration. Requests come in fours of one prompt, probe on, off, off, on and
then the other way round, so that a slow drift of the server falls on both alike. The figure is the ratio of decode
throughput, on to off, with a 95 % t interval over the fours (logarithms), and the same trimmed, where the machine is
not quiet. Off is a probe that records nothing; its calls stay wrapped, which costs a microsecond a cycle.

Whether it is right is asked twice. Recorded cycles, summed over a request, against the client's clock from first to
last token, and against the host's clock between the starts of the same cycles. And phase by phase against the server's
own profiler over the same cycles (`benchmarks.probe_against_profiler`).
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy import stats

from benchmarks.bench_engine import BenchEngine
from benchmarks.probe_against_profiler import CYCLES, PARTS, compare, first_rank
from benchmarks.record import record
from sweeps.engines.base import EngineError
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import read_spec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks

ORDERS = ((True, False, False, True), (False, True, True, False))
"""Probe on or off within one four, in turn: neither is always the first of a prompt."""
WARMUP_REQUESTS = 12
SUM_BLOCKS = 10
TRACED_CYCLES = 64
RUN_AHEAD_CYCLES = 8
"""Within which a host has got as far ahead of its GPU as it will (recorded H200 sweeps)."""


def main() -> None:
    """Measure, print, record."""
    arguments = _arguments()
    spec = read_spec(arguments.spec)
    with tempfile.TemporaryDirectory() as folder:
        engine = BenchEngine(spec, logs=Path(folder))
        try:
            traces = arguments.traces or Path(folder) / "traces"
            figures: dict[str, object] = {}
            for part in measure(engine, spec, num_fours=math.ceil(arguments.requests / 2), traces=traces):
                for name, value in part.items():
                    print(f"{name}: {value}", flush=True)
                figures |= part
        except EngineError as error:
            print(error.log_tail or "", file=sys.stderr)  # its log goes with the temporary folder
            raise
        finally:
            engine.close()
    print(record(arguments.name, figures))


def measure(engine: BenchEngine, spec: SweepSpec, *, num_fours: int, traces: Path) -> Iterator[Mapping[str, object]]:
    """Figures of the spec's first speculative configuration, as they come: what stands if a later part fails.

    The profiler's traces and the probe's cycles beside them stay in `traces`.
    """
    configuration = _configuration(spec)
    report = engine.launch(configuration)
    blocks = _single_requests(spec)
    for block in itertools.islice(itertools.cycle(blocks), WARMUP_REQUESTS):
        engine.generate(block)
    turns = zip(itertools.cycle(blocks), itertools.cycle(ORDERS), strict=False)
    fours = [_four(engine, block, order) for block, order in itertools.islice(turns, num_fours)]
    engine.record_cycles(on=True)
    yield {
        "engine": f"SGLang {report.version}",
        "machine": report.machine,
        "configuration": configuration.label,
        "requests_each": 2 * num_fours,
        "output_tokens": spec.workload.output_tokens,
        **_ratio(np.array(fours)),
    }
    yield _sums(engine, blocks[:SUM_BLOCKS])
    yield {"against_profiler": _against_profiler(engine, blocks[0], traces)}


def _configuration(spec: SweepSpec) -> Configuration:
    return next(each for each in Space(spec).configurations() if each.speculates)


def _single_requests(spec: SweepSpec) -> list[Block]:
    """One block a prompt, at concurrency 1."""
    planned = plan_blocks(spec.workload, folder=Path.cwd())
    prompts = [prompt for block in planned for prompt in block.prompts]
    return [replace(planned[-1], index=number, prompts=(each,), concurrency=1) for number, each in enumerate(prompts)]


def _four(engine: BenchEngine, block: Block, order: Sequence[bool]) -> tuple[float, float]:
    """Logarithm of the decode rate with the probe on and off, each the mean of two requests."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for is_on in order:
        engine.record_cycles(on=is_on)
        load = engine.generate(block)
        rates[is_on].append(math.log(load.decode_tokens / load.decode_s))
    return float(np.mean(rates[True])), float(np.mean(rates[False]))


def _ratio(fours: np.ndarray) -> dict[str, object]:
    differences = fours[:, 0] - fours[:, 1]
    interval = stats.t.interval(0.95, len(differences) - 1, loc=differences.mean(), scale=stats.sem(differences))
    trimmed = stats.bootstrap((differences,), _trimmed, method="percentile", rng=np.random.default_rng(0))
    return {
        "tok_s_probe_off": float(np.exp(fours[:, 1].mean())),
        "ratio_on_to_off": float(np.exp(differences.mean())),
        "interval_95": [float(np.exp(bound)) for bound in interval],
        "trimmed_ratio": float(np.exp(_trimmed(differences))),
        "trimmed_interval_95": [float(np.exp(bound)) for bound in trimmed.confidence_interval],
        "spread_of_one_four": float(differences.std(ddof=1)),
    }


def _trimmed(values: np.ndarray, axis: int = 0) -> Any:
    """Mean without the lowest and highest fifth: other work on the machine makes outliers of single requests."""
    return stats.trim_mean(values, 0.2, axis=axis)


def _sums(engine: BenchEngine, blocks: list[Block]) -> dict[str, object]:
    """Cycles as recorded against two other clocks; phases and gap make up a cycle by construction.

    With overlap scheduling the host comes to run most of a cycle ahead of its GPU within the first cycles of a request,
    so over a whole request its clock is short by that: `settled` leaves the first cycles out.
    """
    of_client, of_starts, of_settled, of_phases, means = [], [], [], [], []
    for block in blocks:
        result = engine.run_block(block)
        cycles = first_rank(result.cycles)
        whole = cycles["cycle_ms"]
        # with overlap scheduling a request's last cycle comes after its last token
        needed = int(np.searchsorted(np.cumsum(cycles["tokens"]), result.decode_tokens)) + 1
        of_client.append(whole[:needed].sum() / 1000.0 / result.decode_s)
        of_starts.append(whole[:-1].sum() / np.ptp(cycles["started_ms"]))
        of_settled.append(whole[RUN_AHEAD_CYCLES:-1].sum() / np.ptp(cycles["started_ms"][RUN_AHEAD_CYCLES:]))
        of_phases.append(sum(cycles[name].sum() for name in PARTS) / whole.sum())
        means.append(whole.mean())
    return {
        "cycle_mean_ms": float(np.mean(means)),
        "phases_and_gap_to_cycles": float(np.mean(of_phases)),
        "cycles_to_client_wall": float(np.mean(of_client)),
        "cycles_to_host_starts": float(np.mean(of_starts)),
        "settled_cycles_to_host_starts": float(np.mean(of_settled)),
    }


def _against_profiler(engine: BenchEngine, block: Block, folder: Path) -> dict[str, object]:
    folder.mkdir(parents=True, exist_ok=True)
    recorded = engine.profile(replace(block, output_tokens=TRACED_CYCLES + 16), folder, num_steps=TRACED_CYCLES)
    pq.write_table(recorded, folder / CYCLES)
    return compare(folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe_overhead", description="Cost of the cycle probe.")
    parser.add_argument("spec", type=Path, metavar="SPEC")
    parser.add_argument("--requests", type=int, default=200, help="requests with the probe on, and as many with it off")
    parser.add_argument("--name", default="probe_overhead", help="name of the record")
    parser.add_argument("--traces", type=lambda text: Path(text).absolute(), help="keep the profiler's traces there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
