"""Two checks of a trial's output: was any draft token accepted, and does it equal the output without speculation?

Greedy output must not depend on speculation or communication, but rounding may flip a near tie, after which the rest
differs. So heads are compared (the first ids of each output): rounding flips few of them, corruption nearly all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sweeps.engines.base import EngineError
from sweeps.measure.records import TRIAL_LETTERS
from sweeps.results.tables import ResultsFolder, read_part

INERT_CYCLES = 100
"""Fewer do not tell an inert draft from a poor one: accepted at 5 %, 0.6 % of trials this long see no draft token."""
INERT_ACCEPT_LENGTH = 1.001
COMPARED_AT_LEAST = 4
_LEAST_SHARE = 0.5

Outputs = Mapping[tuple[int | None, int, str], str]
"""(concurrency, block index, prompt id) -> hash of the output's head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Agreement of one trial's heads with those of the controls."""

    compared: int
    equal: int
    """Agreement with the control that agrees best."""
    controls_share: float
    """Agreement of the two controls that agree least; 1.0 if there is one control."""

    @property
    def share(self) -> float:
        return self.equal / self.compared


def refuse_inert_draft(blocks: Iterable[Mapping[str, Any]]) -> None:
    """Raise EngineError (`draft_inert`) if no draft token was ever accepted: cost of speculation, none of its gain.

    Args:
        blocks: rows of `blocks` of one trial.
    """
    lengths = [(row["accept_length"], row["num_cycles"]) for row in blocks if row["accept_length"] is not None]
    cycles = sum(count for _, count in lengths)
    if cycles < INERT_CYCLES:
        return
    accept_length = sum(length * count for length, count in lengths) / cycles
    if accept_length <= INERT_ACCEPT_LENGTH:
        raise EngineError(
            f"accept length {accept_length:.4f} over {cycles} verify cycles: no draft token is accepted",
            stage="measure",
            kind="draft_inert",
        )


def refuse_wrong_output(own: Outputs, controls: Sequence[Outputs]) -> Agreement | None:
    """Raise EngineError (`wrong_output`) if fewer than half as many heads agree as between controls.

    Returns the agreement; None without a control, or with fewer than COMPARED_AT_LEAST requests in common.
    """
    agreement = agree(own, controls)
    if agreement is not None and agreement.share < _LEAST_SHARE * agreement.controls_share:
        raise EngineError(
            f"greedy output begins like the control's in {agreement.equal} of {agreement.compared} requests "
            f"(controls among themselves: {agreement.controls_share:.0%})",
            stage="measure",
            kind="wrong_output",
        )
    return agreement


def agree(own: Outputs, controls: Sequence[Outputs]) -> Agreement | None:
    """How far `own` and the controls are the same."""
    pairs = [_equal(own, control) for control in controls]
    pairs = [(equal, compared) for equal, compared in pairs if compared >= COMPARED_AT_LEAST]
    if not pairs:
        return None
    equal, compared = max(pairs, key=lambda pair: pair[0] / pair[1])
    among = [_equal(first, second) for first, second in combinations(controls, 2)]
    shares = [same / both for same, both in among if both]
    return Agreement(compared=compared, equal=equal, controls_share=min(shares, default=1.0))


def _equal(one: Outputs, other: Outputs) -> tuple[int, int]:
    common = one.keys() & other.keys()
    return sum(one[key] == other[key] for key in common), len(common)


def outputs_of(requests: Iterable[Mapping[str, Any]]) -> Outputs:
    """From rows of `requests`; those without a head are left out."""
    return {
        (row["concurrency"], row["block_index"], row["prompt_id"]): row["head_hash"]
        for row in requests
        if row["head_hash"] is not None
    }


def control_outputs(folder: ResultsFolder) -> tuple[Outputs, ...]:
    """Heads of every control (trial ids `k...`) whose rows are in the folder."""
    pattern = f"{TRIAL_LETTERS['control']}*.parquet"
    parts = (path.stem.rpartition("-a") for path in sorted((folder.root / "tables" / "requests").glob(pattern)))
    tables = [read_part(folder, "requests", trial_id=trial_id, attempt=int(attempt)) for trial_id, _, attempt in parts]
    return tuple(outputs for table in tables if (outputs := outputs_of(table.to_pylist())))
