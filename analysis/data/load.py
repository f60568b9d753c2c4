"""A results folder as frames: what counts, what was left out of it and why, what a reader should be warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from analysis.data.excluded import (
    Excluded,
    damaged_files,
    exclude_trial,
    lost_settings,
    measured_again,
    why_excluded,
    without_suspects,
)
from analysis.data.judged import judged
from analysis.data.served import corrections, with_served
from analysis.data.sound import read_sound
from analysis.data.unread import with_twins
from analysis.data.warned import imported_from, warnings_of
from sweeps.results.events import BUDGET_REASON
from sweeps.results.tables import ACTIVITIES, TABLES, ResultsFolder, TableError

_READ = ("trials", "blocks", "anchors", "requests", "kernels", "evidence", "events")


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """One results folder: `all_trials` is everything that cost time, `trials` and `blocks` what may be compared."""

    root: Path
    sweep_id: str
    engine: str
    target_tok_s: float | None
    num_configurations: int | None
    """Size of the searched space, if the manifest tells."""
    all_trials: pl.DataFrame
    trials: pl.DataFrame
    """Completed or pruned, with at least one valid block, the last attempt only; `launch` names the server's launch,
    `twin` the configuration that it repeats in fact."""
    blocks: pl.DataFrame
    """At the concurrency that the search decided on."""
    all_blocks: pl.DataFrame
    """Valid ones at every concurrency."""
    concurrencies: tuple[int, ...]
    """Those that were measured, the one that the search decided on first."""
    anchors: pl.DataFrame
    """Blocks at step count 0 inside the servers of `trials`: no part of their configurations."""
    requests: pl.DataFrame
    """Of `trials`."""
    kernels: pl.DataFrame
    evidence: pl.DataFrame
    excluded: tuple[Excluded, ...]
    warnings: tuple[str, ...]
    search_ended: bool
    """The search is certain, or nothing is left to measure. False if a budget, a signal or a crash cut it off."""
    imported: bool = False
    """Numbers of others: nothing is claimed of what was launched once."""

    @property
    def simulated(self) -> bool:
        return self.engine == "simulated"

    def at(self, concurrency: int) -> Results:
        """The same sweep as if it had measured this concurrency alone."""
        return replace(self, blocks=self.all_blocks.filter(pl.col("concurrency") == concurrency))

    @property
    def pinned(self) -> bool:
        """Acceptance was simulated, at least in some trials: no recommendation may be made."""
        return "pinned" in self.all_trials["acceptance"].to_list()


def load(root: str | Path, *, strict: bool = False) -> Results:
    """Read a results folder. Damaged files cost their own rows and are `excluded`.

    Args:
        strict: damage is an error.

    Raises TableError, one line, if the folder is missing, foreign, without a readable trial, or damaged and `strict`.
    """
    folder = _folder(Path(root))
    manifest = _manifest(folder)
    read = read_sound(folder, _READ, sweep_id=str(manifest["sweep_id"]))
    if strict and read.damaged:
        raise TableError(f"--strict: {root}: {len(read.damaged)} files are damaged; the first: {read.damaged[0]}")
    found = _results(folder.root, manifest, read.frames)
    return replace(found, excluded=(*damaged_files(read), *found.excluded))


def from_tables(tables: Mapping[str, pa.Table], manifest: Mapping[str, Any], *, root: Path = Path()) -> Results:
    """As `load`, of a sweep in memory: a simulated one, say.

    Args:
        tables: by name, with the columns of `sweeps.results.tables.TABLES`; a table that is missing has no rows.
        manifest: `sweep_id` and `engine` at least, as `sweep.json` has them.
        root: what `Results.root` says.
    """
    frames = {name: _polars(tables.get(name, schema.empty_table())) for name, schema in TABLES.items()}
    return _results(root, manifest, frames)


def _results(root: Path, manifest: Mapping[str, Any], frames: Mapping[str, pl.DataFrame]) -> Results:
    every = frames["trials"]
    last = pl.col("attempt") == pl.col("attempt").max().over("trial_id")
    superseded = [exclude_trial(row, "superseded", "another attempt followed") for row in _rows(every.filter(~last))]
    latest = every.filter(last)
    evidence = _of(frames["evidence"], latest)
    lost = lost_settings(evidence)
    requests = _of(frames["requests"], latest)
    measured = judged(_of(frames["blocks"], latest).with_columns(pl.col("concurrency").fill_null(1)), latest, requests)
    concurrencies = tuple(measured.sort("started_s")["concurrency"].unique(maintain_order=True))
    all_blocks, dropped = without_suspects(measured, latest)
    has_blocks = set(all_blocks.filter(pl.col("concurrency").is_in(concurrencies[:1]))["trial_id"])
    left_out: dict[str, Excluded] = {}
    for row in _rows(latest):
        if (why := why_excluded(row, lost, has_blocks)) is not None:
            left_out[row["trial_id"]] = exclude_trial(row, *(measured_again(row, latest) or why))
    traced = _of(frames["kernels"], latest)
    launched = with_served(_with_launches(latest), traced)
    trials = with_twins(launched, evidence).filter(~pl.col("trial_id").is_in(list(left_out)))
    all_blocks = all_blocks.filter(pl.col("trial_id").is_in(trials["trial_id"].to_list()))
    blocks = all_blocks.filter(pl.col("concurrency").is_in(concurrencies[:1]))
    pruned = [
        exclude_trial(row, "pruned", row["reason"] or "no reason stored")
        for row in _rows(trials)
        if row["status"] == "pruned"
    ]
    return Results(
        root=root,
        sweep_id=str(manifest["sweep_id"]),
        engine=str(manifest["engine"]),
        target_tok_s=manifest.get("target_tok_s"),
        num_configurations=manifest.get("num_configurations"),
        all_trials=every,
        trials=trials,
        blocks=blocks,
        all_blocks=all_blocks,
        concurrencies=concurrencies,
        requests=_of(requests, trials),
        anchors=_sound_anchors(_of(frames["anchors"], trials)),
        kernels=_of(traced, trials),
        evidence=evidence,
        excluded=(*left_out.values(), *pruned, *dropped, *superseded),
        search_ended=_search_ended(manifest.get("num_configurations"), latest, frames["events"]),
        imported=bool(manifest.get("imported")),
        warnings=(
            *imported_from(manifest),
            *warnings_of(latest, trials, all_blocks, evidence),
            *corrections(latest, launched),
        ),
    )


def _search_ended(num_configurations: int | None, latest: pl.DataFrame, events: pl.DataFrame) -> bool:
    """Whether the search stopped for a reason of its own, or tried every configuration. True without their number."""
    stops = events.filter(pl.col("event") == "search_stopped")["detail"].fill_null("")
    if num_configurations is None or (~stops.str.starts_with(BUDGET_REASON)).any():
        return True
    tried = latest.filter(pl.col("status").is_in(["completed", "pruned", "failed", "invalid"]))
    return tried["configuration_id"].drop_nulls().n_unique() >= num_configurations


def gpu_seconds(results: Results) -> dict[str, float]:
    """GPU seconds by activity over every attempt: wall seconds x GPUs held."""
    frame = results.all_trials
    return {name: float((frame[f"{name}_s"] * frame["num_gpus"]).sum()) for name in ACTIVITIES}


def read_frames(root: Path) -> dict[str, pl.DataFrame]:
    """Every table as it was recorded, by name; a damaged file is left out with a warning. Raises TableError."""
    folder, sweep_id = open_folder(root)
    read = read_sound(folder, tuple(TABLES), sweep_id=sweep_id)
    for damage in read.damaged:
        warnings.warn(f"{root}: {damage}", stacklevel=3)
    return dict(read.frames)


def open_folder(root: Path) -> tuple[ResultsFolder, str]:
    """The folder and its sweep's id. Raises TableError, one line, if it is missing, unreadable or none of ours."""
    folder = _folder(root)
    return folder, str(_manifest(folder)["sweep_id"])


def _folder(root: Path) -> ResultsFolder:
    try:
        if root.is_dir():
            return ResultsFolder(root)
    except PermissionError as error:
        raise TableError(f"{root}: cannot be read: {error.strerror}") from error
    raise TableError(f"{root}: wanted a results folder, but there is no such folder")


def _manifest(folder: ResultsFolder) -> dict[str, Any]:
    try:
        manifest = folder.read_manifest()
    except ValueError as error:
        if isinstance(error, TableError):
            raise
        raise TableError(f"{folder.manifest}: not valid JSON: {error}") from error
    missing = [key for key in ("sweep_id", "engine") if key not in manifest] if isinstance(manifest, dict) else ["keys"]
    if missing:
        raise TableError(f"{folder.manifest}: wanted the manifest of a sweep, but {', '.join(missing)} missing")
    return manifest


def _polars(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _of(frame: pl.DataFrame, trials: pl.DataFrame) -> pl.DataFrame:
    return frame.join(trials.select("trial_id", "attempt"), on=["trial_id", "attempt"], how="semi")


def _rows(frame: pl.DataFrame) -> Iterator[dict[str, Any]]:
    return frame.iter_rows(named=True)


def _sound_anchors(anchors: pl.DataFrame) -> pl.DataFrame:
    return judged(anchors, anchors.select("trial_id", num_steps=pl.lit(0), num_draft_tokens=pl.lit(None)), None).filter(
        pl.col("suspect").is_null()
    )


def _with_launches(trials: pl.DataFrame) -> pl.DataFrame:
    """Add `launch` (the trial that launched the server, for all that it served) and `at_s` (seconds since the node's
    first trial)."""
    node = pl.col("node").fill_null("")
    ordered = trials.with_columns(node=node).sort("node", "started_s", "trial_id")  # a wall clock may step back
    other_key = pl.col("launch_key") != pl.col("launch_key").shift(1).over("node")
    started_anew = pl.col("relaunched").fill_null(value=True) | other_key.fill_null(value=True)
    numbered = ordered.with_columns(number=started_anew.cum_sum().over("node"))
    return numbered.with_columns(
        launch=pl.col("trial_id").first().over("node", "number"),
        at_s=pl.col("started_s") - pl.col("started_s").min().over("node"),
    )
