"""Budgets on the command line: `--trials`, `--gpu-hours`, `--wall-hours` in place of the spec's `budget`.

A budget does not change what is measured, so a folder accepts the same spec with another one.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from sweeps.spec.document import SpecError
from sweeps.spec.model import SweepSpec


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """Three options; each that is given stands for the spec's own."""
    group = parser.add_argument_group(
        "budget", "each stands for that of the spec; whichever is reached first ends the sweep"
    )
    group.add_argument("--trials", type=int, metavar="N", help="candidates; controls are not counted")
    group.add_argument("--gpu-hours", type=float, metavar="H", help="held GPUs x hours")
    group.add_argument("--wall-hours", type=float, metavar="H", help="hours of this run of the driver")


def with_budget(spec: SweepSpec, options: argparse.Namespace) -> SweepSpec:
    """The spec with the budgets of the command line. Raises SpecError for what is not positive and finite."""
    given = {name: getattr(options, name) for name in ("trials", "gpu_hours", "wall_hours")}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise SpecError(f"--{name.replace('_', '-')}: wanted a positive number, got {value:g}")
    return replace(spec, budget=replace(spec.budget, **given))
