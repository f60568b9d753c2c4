"""Which part of a cycle may depend on which dimension: the assumptions of the cycle model, in one table.

A term is a product of *levels* (one effect per value) and *lines* (one slope). Its scales are the sizes, relative to
the factor, that its effects may have; the sweep's own data weigh them against each other. A dimension that is in no
term of a factor cannot change it: that is what makes one measurement speak for many configurations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sweeps.spec.model import Scalar
from sweeps.spec.space import Configuration

Factor = Literal["forward", "draft", "rest", "accept_length"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Term:
    """One group of effects."""

    levels: tuple[str, ...] = ()
    """Dimensions; `args` and `env` stand for each dimension of theirs."""
    lines: tuple[str, ...] = ()
    """Names in LINES."""
    scales: tuple[float, ...] = (1.0,)

    @property
    def name(self) -> str:
        return " x ".join((*self.levels, *self.lines)) or "level"


def tree_depth(configuration: Configuration) -> float:
    """Depth that a draft tree of n - 1 nodes reaches if its levels are sqrt(top-k) wide; for a chain its steps.

    A starting point alone: the terms of `accept_length` correct it.
    """
    nodes = (configuration.num_draft_tokens or 1) - 1
    return max(1.0, min(float(configuration.num_steps), nodes / math.sqrt(configuration.eagle_topk or 1)))


# Lines are scaled to about 1 at the largest value of usual spaces (8 steps, top-k 5, 8 draft tokens), so that the scale
# of a slope is about the share of the factor that it moves.
LINES: Mapping[str, Callable[[Configuration], float]] = {
    "speculates": lambda c: float(c.speculates),
    "steps": lambda c: c.num_steps / 8.0,
    "widening": lambda c: c.num_steps / 8.0 * ((c.eagle_topk or 1) - 1) / 4.0,
    "tree": lambda c: float((c.eagle_topk or 1) > 1),
    "tree_width": lambda c: math.log2(c.eagle_topk or 1),
    "tree_fill": lambda c: math.log2((c.num_draft_tokens or 1) / (c.num_steps + 1)) if (c.eagle_topk or 1) > 1 else 0.0,
    "tree_starved": lambda c: math.log2(c.num_steps / tree_depth(c)) if (c.eagle_topk or 1) > 1 else 0.0,
    "tree_depth": lambda c: c.num_steps / 8.0 if (c.eagle_topk or 1) > 1 else 0.0,
    "tokens": lambda c: ((c.num_draft_tokens or 1) - 1) / 8.0,
    "log_tokens": lambda c: math.log2(c.num_draft_tokens or 1) / 3.0,
}

EXPECTED = "expected"
"""Regressor: time that the table adds to a forward, relative. It was subtracted before: slope 0 is a right table."""

# Scales are shares of the factor (for accept_length: differences of its log), about a factor of 3 to 10 apart. Not
# tuned: guesses of how large an effect may be, which the data weigh against each other.
_SMALL, _MIDDLE = (0.0005, 0.003, 0.02), (0.0005, 0.005, 0.05, 0.4)
_NCCL = (0.0005, 0.002, 0.006, 0.02, 0.06, 0.2, 0.6)

TERMS: Mapping[Factor, tuple[Term, ...]] = {
    # The target's forward, inside verify or as a plain step. Collectives add milliseconds, they multiply nothing.
    "forward": (
        Term(),
        Term(lines=("speculates",), scales=(1.5,)),
        Term(lines=("tokens",), scales=(0.03, 0.3)),
        Term(lines=("log_tokens",), scales=(0.03, 0.3)),
        Term(lines=("tree",), scales=_SMALL),
        Term(levels=("tokens",), scales=_SMALL),
        Term(levels=("nccl",), scales=_NCCL),
        Term(levels=("nccl",), lines=("tokens",), scales=_SMALL),
        Term(levels=("args",), scales=_MIDDLE),
        Term(levels=("env",), scales=_MIDDLE),
        Term(levels=("args", "nccl"), scales=_MIDDLE),
        Term(levels=("env", "nccl"), scales=_MIDDLE),
        Term(levels=("nccl", "eagle_topk"), scales=(0.0005, 0.004, 0.03)),
        Term(lines=(EXPECTED,), scales=(0.1, 1.0)),
    ),
    "draft": (
        Term(),
        Term(lines=("steps",), scales=(2.0,)),
        Term(lines=("widening",), scales=(0.05, 0.5)),
        Term(levels=("drafter",), scales=_MIDDLE),
        Term(levels=("drafter",), lines=("steps",), scales=_MIDDLE),
        Term(levels=("nccl",), lines=("steps",), scales=_MIDDLE),
        Term(levels=("args",), scales=_MIDDLE),
    ),
    # Draft-extend and the gaps between the phases.
    "rest": (
        Term(),
        Term(lines=("tokens",), scales=(0.5,)),
        Term(levels=("drafter",), scales=_MIDDLE),
        Term(levels=("nccl",), scales=_MIDDLE),
        Term(levels=("args",), scales=_MIDDLE),
    ),
    # Log accept length of a tree, against a chain of the tree's depth; chains come from accept histograms.
    "accept_length": (
        Term(lines=("tree",), scales=(0.1,)),
        Term(lines=("tree_width",), scales=(0.02, 0.08)),
        Term(lines=("tree_fill",), scales=(0.05, 0.15)),
        Term(lines=("tree_starved",), scales=(0.03, 0.1)),
        Term(lines=("tree_depth",), scales=(0.05, 0.15)),
        Term(lines=("tree_depth", "tree_width"), scales=(0.03, 0.1)),
        Term(lines=("tree_depth", "tree_fill"), scales=(0.03, 0.1)),
    ),
}

WIDENED: Mapping[Factor, tuple[Term, ...]] = {
    "forward": (
        Term(levels=("nccl", "eagle_topk", "speculates"), scales=(0.003, 0.02, 0.1)),
        Term(levels=("eagle_topk", "steps"), scales=(0.003, 0.02)),
    ),
    "draft": (
        Term(levels=("nccl", "eagle_topk"), scales=(0.02, 0.1)),
        Term(levels=("steps",), scales=(0.02, 0.1, 0.4)),
    ),
    # Where a host is behind, by how much goes by step count, in no order (two H200).
    "rest": (
        Term(levels=("nccl", "eagle_topk"), scales=(0.02, 0.1)),
        Term(levels=("steps",), scales=(0.02, 0.1, 0.4, 2.0)),
    ),
    "accept_length": (
        Term(levels=("nccl",), scales=(0.003, 0.02, 0.08)),
        Term(levels=("args",), scales=(0.003, 0.02, 0.08)),
        Term(levels=("env",), scales=(0.003, 0.02, 0.08)),
    ),
}
"""What a factor gets when a measurement contradicts its terms."""


@dataclass(frozen=True, slots=True)
class Design:
    """Columns of a factor over the configurations, and the group of each."""

    terms: tuple[Term, ...]
    columns: Floats
    """(configurations, columns)"""
    group: NDArray[np.int64]
    """Index of the term of each column, (columns,)."""


def design(
    terms: Iterable[Term],
    configurations: tuple[Configuration, ...],
    *,
    expected: Floats | None = None,
    nccl_acts: NDArray[np.bool_] | None = None,
) -> Design:
    """Build the columns of `terms`; a level that no two configurations differ in has none.

    Args:
        expected: the regressor EXPECTED, (configurations,).
        nccl_acts: (configurations,) whether NCCL sets can have an effect there; None: everywhere.
    """
    kept: list[Term] = []
    blocks: list[Floats] = []
    for term in _expanded(terms, configurations):
        if term.lines == (EXPECTED,):
            line = np.zeros(len(configurations)) if expected is None else expected
        else:
            line = np.array([math.prod(LINES[name](c) for name in term.lines) for c in configurations])
        if nccl_acts is not None and "nccl" in term.levels:
            line = line * nccl_acts
        keys = [tuple(level(c, name) for name in term.levels) for c in configurations]
        known = dict.fromkeys(keys)
        if (term.levels and len(known) < 2) or not line.any():
            continue
        places = {key: index for index, key in enumerate(known)}
        block = np.zeros((len(configurations), len(known)))
        block[np.arange(len(configurations)), [places[key] for key in keys]] = line
        kept.append(term)
        blocks.append(block)
    group = np.repeat(np.arange(len(blocks)), [block.shape[1] for block in blocks])
    columns = np.concatenate(blocks, axis=1) if blocks else np.zeros((len(configurations), 0))
    return Design(tuple(kept), columns, group)


def level(configuration: Configuration, name: str) -> Scalar | None:
    """The value of a dimension in an effective configuration."""
    if name == "nccl":
        return configuration.nccl_set
    if name == "tokens":
        return configuration.num_draft_tokens or 1
    if name == "steps":
        return configuration.num_steps
    if name == "speculates":
        return configuration.speculates
    section, _, key = name.partition(".")
    if section == "args":
        return dict(configuration.args)[key]
    if section == "env":
        return dict(configuration.env)[key]
    value: Scalar | None = getattr(configuration, name)
    return value


def _expanded(terms: Iterable[Term], configurations: tuple[Configuration, ...]) -> Iterable[Term]:
    first = configurations[0]
    own = {"args": [f"args.{name}" for name, _ in first.args], "env": [f"env.{name}" for name, _ in first.env]}
    for term in terms:
        generic = next((name for name in term.levels if name in own), None)
        if generic is None:
            yield term
            continue
        for name in own[generic]:
            levels = tuple(name if each == generic else each for each in term.levels)
            yield replace(term, levels=levels)
