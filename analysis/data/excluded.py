"""What was tried or measured and takes no part in the comparisons, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.data.sound import SoundTables


@dataclass(frozen=True, kw_only=True, slots=True)
class Excluded:
    """Something that was tried or measured and takes no part in the comparisons."""

    what: str
    """`trial`, `blocks`, or `file`: a damaged file of the folder, named in `reason`."""
    trial_id: str
    label: str
    kind: str
    """`damaged`; `invalid_config`, `not_effective`, `gpu_oom`, ...; `pruned`; `suspect` (blocks that break a rule of
    `sweeps.results.plausible`); `interrupted` (the driver died or was stopped); `superseded` (another attempt or a
    later trial stands for it)."""
    reason: str
    count: int = 1


def exclude_trial(row: Mapping[str, Any], kind: str, reason: str) -> Excluded:
    """A whole trial."""
    return Excluded(what="trial", trial_id=row["trial_id"], label=row["label"], kind=kind, reason=reason)


def why_excluded(row: Mapping[str, Any], lost: Mapping[str, str], has_blocks: set[str]) -> tuple[str, str] | None:
    """Kind and reason; None for a trial that counts. `lost`: settings that did not take effect, by trial."""
    if row["status"] == "invalid":
        return "invalid_config", row["reason"] or "no reason stored"
    if row["status"] == "failed":
        stage = f" (at {row['stage']})" if row["stage"] else ""
        return row["kind"] or "failed", (row["reason"] or "no reason stored") + stage
    if row["trial_id"] in lost:
        return "not_effective", lost[row["trial_id"]]
    if row["trial_id"] not in has_blocks:
        return "no_valid_block", f"{row['status']} without one sound block"
    return None


def measured_again(row: Mapping[str, Any], latest: pl.DataFrame) -> tuple[str, str] | None:
    """A trial that died with its driver is no alarm if a later trial of its configuration ran in its role."""
    if row["kind"] != "interrupted":
        return None
    same = (pl.col("configuration_id") == row["configuration_id"]) & (pl.col("role") == row["role"])
    index = row["start_index"]
    after = pl.col("started_at") >= row["started_at"] if index is None else pl.col("start_index") > index
    later = latest.filter(same & pl.col("status").is_in(["completed", "pruned"]) & after)
    later = later.sort("start_index", "started_at")
    return None if later.is_empty() else ("superseded", f"interrupted; measured again as {later['trial_id'][0]}")


def lost_settings(evidence: pl.DataFrame) -> dict[str, str]:
    """By trial, the setting that was asked for and did not arrive."""
    arrived = pl.col("seen").eq_missing(pl.col("requested"))  # what nothing reads, though it arrived, is not lost
    away = (pl.col("grade") == "overridden") | ((pl.col("grade") == "not_seen") & ~arrived)
    lost = evidence.filter(away & pl.col("requested").is_not_null())
    return {
        row["trial_id"]: f"{row['setting']}: wanted {row['requested']}, seen {row['seen']} ({row['grade']})"
        for row in lost.iter_rows(named=True)
    }


def without_suspects(blocks: pl.DataFrame, trials: pl.DataFrame) -> tuple[pl.DataFrame, list[Excluded]]:
    """The blocks that are not suspect, and one exclusion for each trial and rule that the others break."""
    labels = dict(zip(trials["trial_id"], trials["label"], strict=True))
    suspect = blocks.filter(pl.col("suspect").is_not_null()).with_columns(
        rule=pl.col("suspect").str.extract(r"^(\w+):")
    )
    dropped = [
        Excluded(
            what="blocks",
            trial_id=trial_id,
            label=labels[trial_id],
            kind="suspect",
            reason=rows["suspect"][0],
            count=rows.height,
        )
        for (trial_id, _), rows in sorted(suspect.group_by(["trial_id", "rule"], maintain_order=True))
    ]
    return blocks.filter(pl.col("suspect").is_null()), dropped


def damaged_files(read: SoundTables) -> Iterator[Excluded]:
    """Every damaged file of the folder."""
    labels = dict(read.frames["trials"].select("trial_id", "label").iter_rows())
    for each in read.damaged:
        trial_id = each.trial_id or ""
        label = labels.get(trial_id, trial_id or each.file)
        yield Excluded(what="file", trial_id=trial_id, label=label, kind="damaged", reason=str(each))
