"""Throughput at pinned accept lengths, in one server: `python -m benchmarks.miniature.pinned_lengths SPEC`.

The server of the spec's first drafter at top-k 1 runs the spec's blocks with real acceptance and with accept lengths
of 1.5 to 3.5, in rounds whose order alternates. What the what-if curve says at such a length (length over the cycle
time at real acceptance) can then be held against what was measured.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.bench_engine import BenchEngine
from benchmarks.record import record
from sweeps.engines.summary import summarise
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import read_spec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks

LENGTHS = (None, 1.5, 2.0, 2.5, 3.0, 3.5)
"""Tokens per cycle; None: as the drafter deserves."""
PLUGIN = Path(__file__).parent / "pinning"
PINNED_LENGTH_FILE = "SPECSWEEP_PINNED_LENGTH_FILE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One block."""

    round: int
    pinned: float | None
    accept_length: float
    cycle_ms: float
    tok_s: float


def measure(
    engine: BenchEngine, configuration: Configuration, blocks: Sequence[Block], *, pin: Path, rounds: int
) -> Iterator[Row]:
    """Launch, warm up with every block, then every length in every round."""
    pin.write_text("", encoding="utf-8")
    engine.launch(configuration)
    for block in blocks:
        engine.run_block(block)
    for number in range(rounds):
        for length in LENGTHS if number % 2 == 0 else LENGTHS[::-1]:
            pin.write_text("" if length is None else str(length), encoding="utf-8")
            for block in blocks:
                summary = summarise(engine.run_block(block), block_index=0)
                assert summary.accept_length is not None, "a server that speculates"
                assert summary.cycle_ms is not None, "a block without cycles"
                assert summary.tok_s is not None, "a block without decode time"
                yield Row(
                    round=number,
                    pinned=length,
                    accept_length=summary.accept_length,
                    cycle_ms=summary.cycle_ms,
                    tok_s=summary.tok_s,
                )


def longest_chain(spec: SweepSpec, num_steps: int) -> Configuration:
    """The chain of this many steps with the spec's first drafter."""
    space = Space(spec).configurations()
    wanted = (num_steps, 1, spec.search.drafter[0] if spec.search.drafter else next(iter(spec.drafters)))
    return next(each for each in space if (each.num_steps, each.eagle_topk, each.drafter) == wanted)


def with_plugin(spec: SweepSpec, pin: Path) -> SweepSpec:
    """The spec whose servers take their accept length from the file `pin`."""
    path = ":".join(filter(None, [spec.engine.env.get("PYTHONPATH"), str(PLUGIN)]))
    variables = {**spec.engine.env, "PYTHONPATH": path, PINNED_LENGTH_FILE: str(pin)}
    return replace(spec, engine=replace(spec.engine, env=variables))


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.miniature.pinned_lengths", description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2, help="blocks of a round at each length")
    parser.add_argument("--logs", type=Path, help="folder for the server's log; a temporary one if absent")
    parser.add_argument("--name", default="miniature_pinned", help="of the record in benchmarks/results")
    options = parser.parse_args()
    spec = read_spec(options.spec)
    blocks = [block for block in plan_blocks(spec.workload, folder=options.spec.parent) if block.concurrency == 1]
    with tempfile.TemporaryDirectory() as folder:
        pin = Path(folder) / "length"
        spec = with_plugin(spec, pin)
        engine = BenchEngine(spec, logs=options.logs or Path(folder))
        rows: list[Mapping[str, object]] = []
        try:
            configuration = longest_chain(spec, options.steps)
            for row in measure(engine, configuration, blocks[: options.blocks], pin=pin, rounds=options.rounds):
                print(row, flush=True)
                rows.append({name: getattr(row, name) for name in Row.__slots__})
        finally:
            engine.close()
            if rows:
                print(record(options.name, {"num_steps": options.steps, "blocks": rows}))


if __name__ == "__main__":
    main()
