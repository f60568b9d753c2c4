"""Two checks of a trial's output: are draft tokens accepted at all, and does it equal the output without speculation?

Greedy output must not depend on speculation or communication, but rounding may flip a near tie, after which the rest
differs. So heads are compared (the first ids of each output): rounding flips few of them, corruption nearly all. What
is right is what most controls say; where they do not agree, nobody fails by them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.engines.base import EngineError
from sweeps.measure.records import TRIAL_LETTERS
from sweeps.results.inert import is_inert
from sweeps.results.part_file import DamagedPartError
from sweeps.results.tables import ResultsFolder, read_part

COMPARED_AT_LEAST = 4
_LEAST_SHARE = 0.5
FEWEST_AGAINST_A_CONTROL = 2
"""Earlier controls against which a further control is judged: with fewer, either may be the broken one."""

Outputs = Mapping[tuple[int | None, int, str], str]
"""(concurrency, block index, prompt id) -> hash of the output's head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Agreement of one trial's heads with what most controls say."""

    compared: int
    """Requests of which most controls say the same."""
    equal: int

    @property
    def share(self) -> float:
        return self.equal / self.compared


def refuse_inert_draft(blocks: Iterable[Mapping[str, Any]]) -> None:
    """Raise EngineError (`draft_inert`) if (nearly) no draft token is accepted: cost of speculation, none of its gain.

    Args:
        blocks: rows of `blocks` of one trial; suspect ones do not count.
    """
    lengths = [
        (row["accept_length"], row["num_cycles"])
        for row in blocks
        if row["accept_length"] is not None and row["suspect"] is None
    ]
    cycles = sum(count for _, count in lengths)
    accepted = sum((length - 1.0) * count for length, count in lengths)
    if is_inert(accepted, cycles):
        raise EngineError(
            f"accept length {1.0 + accepted / cycles:.4f} over {cycles} verify cycles: "
            f"{'no draft token is' if accepted < 0.5 else 'hardly a draft token is'} accepted",
            stage="measure",
            kind="draft_inert",
        )


def refuse_wrong_output(own: Outputs, controls: Sequence[Outputs]) -> Agreement | None:
    """Raise EngineError (`wrong_output`) if fewer than half of the heads are what most controls say.

    Returns the agreement; None with fewer than COMPARED_AT_LEAST requests of which most controls say the same.
    """
    agreement = agree(own, controls)
    if agreement is not None and agreement.share < _LEAST_SHARE:
        raise EngineError(
            f"greedy output begins like that of most controls in {agreement.equal} of {agreement.compared} requests "
            f"({len(controls)} controls)",
            stage="measure",
            kind="wrong_output",
        )
    return agreement


def agree(own: Outputs, controls: Sequence[Outputs]) -> Agreement | None:
    """How far `own` is what most controls say."""
    reference = majority(controls)
    common = own.keys() & reference.keys()
    if len(common) < COMPARED_AT_LEAST:
        return None
    return Agreement(compared=len(common), equal=sum(own[key] == reference[key] for key in common))


def majority(controls: Sequence[Outputs]) -> dict[tuple[int | None, int, str], str]:
    """The head that more than half of the controls with this request have; requests without one are left out.

    One control is the majority of one. Of two that differ none is.
    """
    heads: dict[tuple[int | None, int, str], Counter[str]] = {}
    for control in controls:
        for key, head in control.items():
            heads.setdefault(key, Counter())[head] += 1
    most = {key: counted.most_common(1)[0] for key, counted in heads.items()}
    return {key: head for key, (head, count) in most.items() if 2 * count > heads[key].total()}


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
    tables = []
    for trial_id, _, attempt in parts:
        with contextlib.suppress(DamagedPartError):  # the driver names it when it resumes, the report lists it
            tables.append(read_part(folder, "requests", trial_id=trial_id, attempt=int(attempt)))
    return tuple(outputs for table in tables if (outputs := outputs_of(table.to_pylist())))
