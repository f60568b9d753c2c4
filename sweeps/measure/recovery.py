"""Makes parts of the journals that dead trials left."""

from __future__ import annotations

from sweeps.measure.records import FailureKind
from sweeps.measure.rows import prune_reason
from sweeps.results.journal import Row, TrialRows, left_journals, read_journal, set_aside
from sweeps.results.tables import ResultsFolder


def recover(
    folder: ResultsFolder, *, num_blocks: int, only: str | None = None, died_of: FailureKind = "interrupted"
) -> tuple[str, ...]:
    """Write the parts of trials whose process died, from their journals. Returns their trial ids.

    A trial with a decision to prune is pruned, one with all its `num_blocks` blocks (at every concurrency) completed,
    any other failed. A damaged journal gives what its whole lines hold; it is kept beside, with an event.

    Args:
        only: this trial alone, if others are running.
        died_of: the kind of a trial that failed.
    """
    recovered = []
    for path in left_journals(folder):
        content = read_journal(path)
        rows = content.rows
        if only is not None and (rows is None or rows.trial["trial_id"] != only):
            continue
        if rows is not None and not _is_written(folder, rows):
            trial_id = rows.trial["trial_id"]
            if content.damaged_lines:
                lines = ", ".join(map(str, content.damaged_lines))
                rows.events.append(
                    {**rows.keys, "at_s": rows.trial["ended_s"], "event": "journal_damaged", "detail": f"lines {lines}"}
                )
            if (reason := prune_reason(folder, trial_id)) is not None:
                rows.trial.update(status="pruned", reason=reason, stage=None, kind=None)
            elif len(rows.blocks) >= num_blocks and 2 * sum(map(_is_sound, rows.blocks)) >= len(rows.blocks):
                rows.trial.update(status="completed", reason=None, stage=None, kind=None)
            else:
                rows.trial.update(kind=died_of)
            rows.write(folder)
            recovered.append(trial_id)
        if content.damaged_lines:
            set_aside(path)
        else:
            path.unlink()
    return tuple(recovered)


def _is_sound(block: Row) -> bool:
    return block.get("suspect") is None


def _is_written(folder: ResultsFolder, rows: TrialRows) -> bool:
    return folder.part("trials", rows.trial["trial_id"], rows.trial["attempt"]).is_file()
