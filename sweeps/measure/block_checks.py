"""What a trial's blocks must not be: implausible, drafted for nothing, or of wrong output."""

from __future__ import annotations

from sweeps.engines.base import BlockRecord, EngineError
from sweeps.engines.summary import BlockSummary
from sweeps.measure.block_facts import allowed_rules, facts_of_block, shared_prefixes
from sweeps.measure.output_check import (
    FEWEST_AGAINST_A_CONTROL,
    Outputs,
    control_outputs,
    outputs_of,
    refuse_inert_draft,
    refuse_wrong_output,
)
from sweeps.measure.records import PlannedTrial
from sweeps.measure.trial_context import TrialContext
from sweeps.results.journal import Row, TrialRows
from sweeps.results.plausible import suspect
from sweeps.spec.space import Configuration
from sweeps.spec.workload import Block


class BlockChecks:
    """Checks the blocks of one trial against its rows so far."""

    def __init__(self, trial: PlannedTrial, context: TrialContext, rows: TrialRows) -> None:
        self._trial = trial
        self._context = context
        self._rows = rows
        self._allowed = allowed_rules(context.checks, trial.acceptance)
        self._shared = shared_prefixes(prompt for block in context.blocks for prompt in block.prompts)
        self._controls: tuple[Outputs, ...] | None = None

    def judge(self, record: BlockRecord, summary: BlockSummary, block: Block, served: Configuration) -> str | None:
        """Which rules the block breaks; None if it may be compared."""
        earlier = {
            row["prompt_id"]: row["output_hash"]
            for row in self._rows.requests
            if row["concurrency"] == block.concurrency
        }
        facts = facts_of_block(record, summary, block, served, shared=self._shared, earlier=earlier)
        return suspect(facts, allowed=self._allowed)

    def refuse_implausible(self) -> None:
        """Raise EngineError (`implausible`) if over half of the blocks are suspect: nothing is left to compare by."""
        blocks = self._context.deciding
        lies = [row for row in self._rows.blocks if row["suspect"] and row["concurrency"] == blocks[0].concurrency]
        if 2 * len(lies) > len(blocks):
            raise EngineError(
                f"{len(lies)} of {len(blocks)} blocks cannot be true: block {lies[0]['block_index']}: "
                f"{lies[0]['suspect']}",
                stage="measure",
                kind="implausible",
            )

    def refuse_output(self) -> None:
        """Raise EngineError for an inert draft or wrong output. Pinned acceptance makes neither mean anything."""
        if self._trial.acceptance == "pinned":
            return
        if self._context.checks.inert_draft == "refuse":
            refuse_inert_draft(self._rows.blocks)
        greedy = all(block.temperature == 0 for block in self._context.blocks)
        if self._context.checks.wrong_output == "refuse" and greedy:
            if self._controls is None:
                self._controls = control_outputs(self._context.folder)
            if self._trial.role == "control" and len(self._controls) < FEWEST_AGAINST_A_CONTROL:
                return
            refuse_wrong_output(outputs_of(self._sound_requests()), self._controls)

    def _sound_requests(self) -> list[Row]:
        """Rows of `requests` whose block is not suspect."""
        place = ("block_index", "concurrency")
        lies = {tuple(row[name] for name in place) for row in self._rows.blocks if row["suspect"]}
        return [row for row in self._rows.requests if tuple(row[name] for name in place) not in lies]
