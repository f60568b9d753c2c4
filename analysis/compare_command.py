"""`python -m analysis compare A B`: what an upgrade, another drafter or another node changed."""

from __future__ import annotations

import argparse
import json

from analysis.data.load import load
from analysis.data.place import at_hand
from analysis.judge.comparison import compare_sweeps
from analysis.show.comparison import comparison_document, markdown

FAILED = 1
"""Exit code of a comparison that `--fail-on` names."""


def add_compare_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The options of the command."""
    parser = commands.add_parser("compare", help="two sweeps of the same work: what B changed against A")
    parser.add_argument("before", metavar="A", help="a results folder, or the URL of its copy")
    parser.add_argument("after", metavar="B", help="the results of the same prompts and concurrency")
    parser.add_argument(
        "--fail-on",
        choices=("worse", "undecided"),
        help="exit 1 if the throughput of a configuration is worse (or neither better nor equivalent)",
    )
    parser.add_argument("--format", choices=("md", "json"), default="md", help="markdown for a pull request, or JSON")


def run_compare(options: argparse.Namespace) -> int:
    """Print the comparison. Returns 0, or 1 for what `--fail-on` names; raises TableError, one line."""
    with at_hand(options.before) as before, at_hand(options.after) as after:
        found = compare_sweeps(load(before), load(after))
    if options.format == "json":
        print(json.dumps(comparison_document(found), indent=2, allow_nan=False))
    else:
        print(markdown(found), end="")
    failing = {"worse": ("worse",), "undecided": ("worse", "undecided"), None: ()}[options.fail_on]
    return FAILED if any(pair.verdict in failing for pair in found.pairs) else 0
