"""`python -m analysis report | verdict | compare | query | predict | ...`: what results say."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from analysis.compare_command import add_compare_parser, run_compare
from analysis.data.load import load
from analysis.data.place import at_hand
from analysis.import_command import add_import_parser, run_import
from analysis.judge.break_even import DEFAULT_NUM_STEPS, Accuracy, BreakEven, break_even
from analysis.judge.verdict import verdict
from analysis.predict_command import add_predict_parser, run_predict
from analysis.query_command import add_query_parser, run_query
from analysis.server_log import read_server_log
from analysis.show.document import document
from analysis.show.report import write_report
from analysis.show.short_form import print_short_form
from sweeps.command_end import REFUSED, end
from sweeps.foreign_text import console, print_error, printable
from sweeps.results.store import is_url

_LOG_WIDTH = 140
"""Columns in a log: the tables fit."""


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m analysis") -> int:
    """Run one command. Returns the exit code: 0, 2 for input that cannot be used (one line on stderr), 1 for
    `compare --fail-on`.

    Args:
        prog: the command's name in its usage.
    """
    options = _parser(prog).parse_args(arguments)
    return end(lambda: _command(options))


def _command(options: argparse.Namespace) -> int:
    try:
        if options.command == "break-even":
            return _break_even(options)
        if options.command == "compare":
            return run_compare(options)
        if options.command == "import":
            return run_import(options)
        if options.command == "predict":
            return run_predict(options)
        if options.command == "query":
            return run_query(options)
        if options.command == "server-log":
            return _server_log(options.log, as_json=options.json)
        if options.command == "verdict":
            return _verdict(options.results, as_json=options.json, strict=options.strict)
        page = Path("report.html") if is_url(options.results) else Path(options.results) / "report.html"
        return _report(options.results, options.out or page, strict=options.strict)
    except ValueError as error:
        print_error(error)
        return REFUSED


def _report(results: str, out: Path, *, strict: bool) -> int:
    with at_hand(results) as folder:
        judged = verdict(load(folder, strict=strict))
    try:
        write_report(judged, out)
    except OSError as error:
        raise ValueError(f"--out: {out} cannot be written: {error.strerror}") from error
    print_short_form(judged, console(log_width=_LOG_WIDTH))
    print(f"\nReport: {printable(str(out))}")
    return 0


def _verdict(results: str, *, as_json: bool, strict: bool) -> int:
    with at_hand(results) as folder:
        judged = verdict(load(folder, strict=strict))
    if as_json:
        print(json.dumps(document(judged), indent=2, allow_nan=False))
    else:
        print_short_form(judged, console(log_width=_LOG_WIDTH))
    return 0


def _break_even(options: argparse.Namespace) -> int:
    found = break_even(
        cycle_ms=options.cycle_ms,
        baseline_tok_s=options.baseline_tok_s,
        num_steps=options.num_steps,
        target_tok_s=options.target_tok_s,
    )
    if options.json:
        print(json.dumps(_break_even_document(found), indent=2, allow_nan=False))
        return 0
    print(
        f"Break-even accept length: {found.accept_length:.2f} tokens per cycle "
        f"(a cycle of {found.cycle_ms:g} ms against {found.baseline_tok_s:g} tok/s without speculation)"
    )
    print(_accuracy_line("to break even", found.accuracy))
    if found.target_accuracy is not None:
        print(f"Accept length for {found.target_tok_s:g} tok/s: {found.target_accept_length:.2f}")
        print(_accuracy_line(f"for {found.target_tok_s:g} tok/s", found.target_accuracy))
    return 0


def _server_log(log: Path, *, as_json: bool) -> int:
    found = read_server_log(log)
    if as_json:
        print(json.dumps(asdict(found), indent=2, allow_nan=False))
        return 0
    print(f"Decode throughput: {found.tok_s:.1f} tok/s (median of {found.num_windows} windows of the server's log)")
    print("Accept length: " + ("not in the log" if found.accept_length is None else f"{found.accept_length:.2f}"))
    print("In captured graphs: " + ("not in the log" if found.graph_share is None else f"{found.graph_share:.0%}"))
    print(
        f"Left out: {found.after_prefill} windows with prefill or idle time, {found.impossible} impossible, "
        f"{found.unparsed_lines} lines not understood"
    )
    return 0


def _accuracy_line(purpose: str, accuracy: Accuracy) -> str:
    steps = f"with {accuracy.num_steps} draft step{'' if accuracy.num_steps == 1 else 's'}"
    if accuracy.conditional_accuracy is None:
        return f"Conditional accuracy needed {purpose}, {steps}: none ({accuracy.reason})"
    return f"Conditional accuracy needed {purpose}, {steps}: {accuracy.conditional_accuracy:.2f}"


def _break_even_document(found: BreakEven) -> dict[str, object]:
    """`conditional_accuracy_needed` is for the target if there is one, for breaking even otherwise."""
    wanted = found.target_accuracy or found.accuracy
    return {
        "cycle_ms": found.cycle_ms,
        "baseline_tok_s": found.baseline_tok_s,
        "target_tok_s": found.target_tok_s,
        "num_steps": found.num_steps,
        "break_even_accept_length": found.accept_length,
        "conditional_accuracy_to_break_even": found.accuracy.conditional_accuracy,
        "accept_length_needed": wanted.accept_length,
        "conditional_accuracy_needed": wanted.conditional_accuracy,
        "needed_for": "target" if found.target_accuracy else "break even",
        "reason": wanted.reason,
    }


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="What a sweep's results say.")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="write one self-contained page, and print its short form")
    report.add_argument("results", help="a results folder, or the URL of its copy")
    report.add_argument(
        "--out", type=Path, help="the page (default: report.html in the results folder; of a URL, in this folder)"
    )
    judged = commands.add_parser("verdict", help="the verdicts, for people or programs")
    judged.add_argument("results", help="a results folder, or the URL of its copy")
    judged.add_argument("--json", action="store_true", help="as JSON")
    for command in (report, judged):
        command.add_argument("--strict", action="store_true", help="a damaged file is an error, not an exclusion")
    even = commands.add_parser("break-even", help="the accept length and accuracy that a cycle time asks for")
    even.add_argument("--cycle-ms", type=float, required=True, help="one draft, verify, extend cycle")
    even.add_argument("--baseline-tok-s", type=float, required=True, help="throughput without speculation")
    even.add_argument("--target-tok-s", type=float, help="throughput to reach")
    even.add_argument(
        "--num-steps",
        type=int,
        default=DEFAULT_NUM_STEPS,
        help=f"draft steps per cycle, at this cycle time (default {DEFAULT_NUM_STEPS})",
    )
    even.add_argument("--json", action="store_true", help="as JSON")
    add_compare_parser(commands)
    add_predict_parser(commands)
    add_query_parser(commands)
    add_import_parser(commands)
    log = commands.add_parser("server-log", help="throughput and accept length from an SGLang server's own log")
    log.add_argument("log", type=Path, help="the server's output")
    log.add_argument("--json", action="store_true", help="as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
