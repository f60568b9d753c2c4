"""`python -m analysis import FILE... [--out RESULTS]`: what people already have, as a results folder and in lines."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from analysis.importing.folder import blocks_of, write_folder
from analysis.importing.formats import KNOWN, read_file
from analysis.importing.records import ForeignBlock, ForeignRun, Reading
from analysis.show.imported import import_document, import_lines, summaries, verify_time
from sweeps.foreign_text import printable


def add_import_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The options of the command."""
    parser = commands.add_parser("import", help="logs and benchmarks of others as a results folder, and what they say")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=KNOWN)
    parser.add_argument("--out", type=Path, metavar="RESULTS", help="a new results folder, marked as imported")
    parser.add_argument("--baseline-tok-s", type=float, help="throughput without speculation, if no file tells")
    parser.add_argument("--target-tok-s", type=float, help="throughput to reach")
    parser.add_argument("--tok-s", type=float, help="throughput of a log that has verify lines alone")
    parser.add_argument("--num-steps", type=int, help="draft steps of files that do not tell (0: no speculation)")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run_import(options: argparse.Namespace) -> int:
    """Read, write and print. Returns 0; raises ImportFileError or ValueError, one line, for what cannot be used."""
    for name in ("baseline_tok_s", "target_tok_s", "tok_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')}: wanted a positive number, got {value}")
    if options.num_steps is not None and not 0 <= options.num_steps <= 1000:
        raise ValueError(f"--num-steps: wanted 0 to 1000, got {options.num_steps}")
    readings = [_completed(read_file(path), options.num_steps, options.tok_s) for path in options.files]
    found = summaries(
        readings, baseline_tok_s=options.baseline_tok_s, target_tok_s=options.target_tok_s, tok_s=options.tok_s
    )
    if options.out is not None:
        write_folder(readings, options.out, target_tok_s=options.target_tok_s)
    if options.json:
        print(json.dumps(import_document(readings, found), indent=2, allow_nan=False))
        return 0
    for line in import_lines(readings, found):
        print(printable(line))
    if options.out is not None:
        print(printable(_written(readings, options.out)))
    return 0


def _completed(reading: Reading, num_steps: int | None, tok_s: float | None) -> Reading:
    """With what the user knows and the file does not tell."""
    return replace(reading, runs=tuple(_with_rate(_with_steps(run, num_steps), tok_s) for run in reading.runs))


def _with_steps(run: ForeignRun, num_steps: int | None) -> ForeignRun:
    if num_steps is None or run.drafting.steps is not None:
        return run
    return replace(run, drafting=replace(run.drafting, speculates=num_steps > 0, num_steps=num_steps or None))


def _with_rate(run: ForeignRun, tok_s: float | None) -> ForeignRun:
    """A block of the verify lines of a run that has no rate of its own, if the user gives it."""
    verify = verify_time(run.verify)
    if run.blocks or tok_s is None or verify is None or verify.cycle_ms is None:
        return run
    block = ForeignBlock(
        concurrency=1,
        tok_s=tok_s,
        decode_s=verify.num_cycles * verify.cycle_ms / 1000,
        accept_length=tok_s * verify.cycle_ms / 1000,
        cycle_ms=verify.cycle_ms,
        verify_ms=verify.mean_ms,
    )
    return replace(run, blocks=(block,), accept_length=block.accept_length)


def _written(readings: list[Reading], out: Path) -> str:
    lost = [run.origin for reading in readings for run in reading.runs if run.blocks and not blocks_of(run)]
    note = f"; without the blocks of {', '.join(lost)}, whose draft steps are not known: --num-steps" if lost else ""
    return f"Imported into {out}{note}. Next: specsweep report {out}"
