"""A results folder as frames: what counts, what was left out of it and why, what a reader should be warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from analysis.data.judged import judged
from analysis.data.served import corrections, with_served
from analysis.data.sound import SoundTables, read_sound
from analysis.data.unread import with_twins
from sweeps.results.events import BUDGET_REASON
from sweeps.results.inert import is_inert
from sweeps.results.resolved import EXPECTED_TO_DIFFER, RESOLVED
from sweeps.results.tables import ACTIVITIES, TABLES, ResultsFolder, TableError

_CLOCK_TOLERANCE = 0.02
_CROWDED = 0.6
"""Share of the wanted concurrency below which cycles were not shared as asked (a limit of the server, say)."""
_READ = ("trials", "blocks", "anchors", "requests", "kernels", "evidence", "events")
_SHARED = ("engine", "engine_version", "machine", "num_gpus", "acceptance")


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
    return replace(found, excluded=(*_damage(read), *found.excluded))


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
    superseded = [_exclude_trial(row, "superseded", "another attempt followed") for row in _rows(every.filter(~last))]
    latest = every.filter(last)
    evidence = _of(frames["evidence"], latest)
    lost = _lost_settings(evidence)
    requests = _of(frames["requests"], latest)
    measured = judged(_of(frames["blocks"], latest).with_columns(pl.col("concurrency").fill_null(1)), latest, requests)
    concurrencies = tuple(measured.sort("started_s")["concurrency"].unique(maintain_order=True))
    all_blocks, dropped = _sound(measured, latest)
    has_blocks = set(all_blocks.filter(pl.col("concurrency").is_in(concurrencies[:1]))["trial_id"])
    left_out: dict[str, Excluded] = {}
    for row in _rows(latest):
        if (why := _why_excluded(row, lost, has_blocks)) is not None:
            left_out[row["trial_id"]] = _exclude_trial(row, *(_measured_again(row, latest) or why))
    traced = _of(frames["kernels"], latest)
    launched = with_served(_with_launches(latest), traced)
    trials = with_twins(launched, evidence).filter(~pl.col("trial_id").is_in(list(left_out)))
    all_blocks = all_blocks.filter(pl.col("trial_id").is_in(trials["trial_id"].to_list()))
    blocks = all_blocks.filter(pl.col("concurrency").is_in(concurrencies[:1]))
    pruned = [
        _exclude_trial(row, "pruned", row["reason"] or "no reason stored")
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
            *_imported(manifest),
            *_warnings(latest, trials, all_blocks, evidence),
            *corrections(latest, launched),
        ),
    )


def _imported(manifest: Mapping[str, Any]) -> Iterator[str]:
    if not (files := manifest.get("imported")):
        return
    named = [str(each.get("file")) for each in files if isinstance(each, dict)] if isinstance(files, list) else []
    told = f"{', '.join(named[:6]) or 'files of others'}{' and more' if len(named) > 6 else ''}"
    yield (
        f"imported from {told}: no certificate covers these numbers, accept length counts the bonus token, and nothing "
        "is claimed without repeated launches"
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


def _damage(read: SoundTables) -> Iterator[Excluded]:
    labels = dict(read.frames["trials"].select("trial_id", "label").iter_rows())
    for each in read.damaged:
        trial_id = each.trial_id or ""
        label = labels.get(trial_id, trial_id or each.file)
        yield Excluded(what="file", trial_id=trial_id, label=label, kind="damaged", reason=str(each))


def _polars(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _of(frame: pl.DataFrame, trials: pl.DataFrame) -> pl.DataFrame:
    return frame.join(trials.select("trial_id", "attempt"), on=["trial_id", "attempt"], how="semi")


def _rows(frame: pl.DataFrame) -> Iterator[dict[str, Any]]:
    return frame.iter_rows(named=True)


def _exclude_trial(row: Mapping[str, Any], kind: str, reason: str) -> Excluded:
    return Excluded(what="trial", trial_id=row["trial_id"], label=row["label"], kind=kind, reason=reason)


def _why_excluded(row: Mapping[str, Any], lost: Mapping[str, str], has_blocks: set[str]) -> tuple[str, str] | None:
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


def _measured_again(row: Mapping[str, Any], latest: pl.DataFrame) -> tuple[str, str] | None:
    """A trial that died with its driver is no alarm if a later trial of its configuration ran in its role."""
    if row["kind"] != "interrupted":
        return None
    same = (pl.col("configuration_id") == row["configuration_id"]) & (pl.col("role") == row["role"])
    index = row["start_index"]
    after = pl.col("started_at") >= row["started_at"] if index is None else pl.col("start_index") > index
    later = latest.filter(same & pl.col("status").is_in(["completed", "pruned"]) & after)
    later = later.sort("start_index", "started_at")
    return None if later.is_empty() else ("superseded", f"interrupted; measured again as {later['trial_id'][0]}")


def _lost_settings(evidence: pl.DataFrame) -> dict[str, str]:
    arrived = pl.col("seen").eq_missing(pl.col("requested"))  # what nothing reads, though it arrived, is not lost
    away = (pl.col("grade") == "overridden") | ((pl.col("grade") == "not_seen") & ~arrived)
    lost = evidence.filter(away & pl.col("requested").is_not_null())
    return {
        row["trial_id"]: f"{row['setting']}: wanted {row['requested']}, seen {row['seen']} ({row['grade']})"
        for row in _rows(lost)
    }


def _sound(blocks: pl.DataFrame, trials: pl.DataFrame) -> tuple[pl.DataFrame, list[Excluded]]:
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


def _inert(blocks: pl.DataFrame) -> Iterator[str]:
    """Trials that a sweep measured although hardly a draft token was accepted (`checks.inert_draft: allow`)."""
    accepted = (pl.col("accept_length") - 1.0) * pl.col("num_cycles")
    counts = (
        blocks.filter(pl.col("accept_length").is_not_null() & pl.col("num_cycles").is_not_null())
        .group_by("trial_id")
        .agg(accepted=accepted.sum(), cycles=pl.col("num_cycles").sum())
        .sort("trial_id")
    )
    inert = [row["trial_id"] for row in _rows(counts) if is_inert(row["accepted"], row["cycles"])]
    if inert:
        more = f" and {len(inert) - 8} more" if len(inert) > 8 else ""
        yield (
            f"hardly a draft token is accepted in {', '.join(inert[:8])}{more}: "
            "cycle times hold, but throughput says nothing about speculation"
        )


def _resolved_apart(trials: pl.DataFrame) -> Iterator[str]:
    """What the servers of compared trials decided differently by themselves."""
    told: dict[str, dict[str, list[str]]] = {}
    for row in trials.iter_rows(named=True):
        swept = {name.replace("-", "_") for name in dict(row["args"] or {})}
        for name, value in dict(row["effective"] or {}).items():
            if name in RESOLVED and name not in swept and name not in EXPECTED_TO_DIFFER:
                told.setdefault(name, {}).setdefault(value, []).append(row["trial_id"])
    for name, values in sorted(told.items()):
        if len(values) > 1:
            parts = (
                f"{value[:40]} in {', '.join(ids[:3])}{' ...' if len(ids) > 3 else ''}" for value, ids in values.items()
            )
            yield f"servers resolved {name} differently ({'; '.join(parts)}): comparisons across them are confounded"


def _clocks_apart(trials: pl.DataFrame, blocks: pl.DataFrame) -> Iterator[str]:
    """Trials whose median SM clock differs from the controls', or from all other trials' if no control has one."""
    clocks = blocks.group_by("trial_id").agg(mhz=pl.col("sm_clock_mhz").median()).drop_nulls().sort("trial_id")
    controls = trials.filter(pl.col("role") == "control")["trial_id"].implode()
    of_controls = clocks.filter(pl.col("trial_id").is_in(controls))["mhz"].median()
    usual = of_controls if of_controls is not None else clocks["mhz"].median()
    if not isinstance(usual, float):
        return
    apart = clocks.filter((pl.col("mhz") / usual - 1).abs() > _CLOCK_TOLERANCE)
    if not apart.is_empty():
        listed = ", ".join(f"{trial} {mhz:.0f} MHz" for trial, mhz in apart.head(8).rows())
        more = f" and {apart.height - 8} more" if apart.height > 8 else ""
        yield (
            f"the median SM clock is more than {_CLOCK_TOLERANCE:.0%} away from the "
            f"{'control' if of_controls is not None else 'sweep'}'s {usual:.0f} MHz in {listed}{more}"
        )


def _crowds(blocks: pl.DataFrame) -> Iterator[tuple[int, float]]:
    """Each concurrency beyond 1, and the requests that shared a cycle: tok/s x seconds of a cycle / accept length."""
    shared = pl.col("tok_s") * pl.col("cycle_ms") / 1000 / pl.col("accept_length").fill_null(1.0)
    many = blocks.filter(pl.col("concurrency") > 1).group_by("concurrency").agg(reached=shared.median()).drop_nulls()
    yield from many.sort("concurrency").iter_rows()


def _warnings(
    latest: pl.DataFrame, trials: pl.DataFrame, blocks: pl.DataFrame, evidence: pl.DataFrame
) -> Iterator[str]:
    for column in _SHARED:
        values = sorted(map(str, trials[column].drop_nulls().unique()))
        if len(values) > 1:
            yield f"trials differ in {column} ({', '.join(values)}): comparisons across them are confounded"
    if "pinned" in latest["acceptance"].to_list():
        yield "acceptance is pinned (simulated by the server): cycle times are valid, throughput is not"
    yield from _inert(blocks)
    yield from _resolved_apart(trials)
    yield from _clocks_apart(trials, blocks)
    throttled = blocks.filter(~pl.col("throttle_reasons").fill_null("").is_in(["", "0", "none", "0x0"]))
    if not throttled.is_empty():
        count = throttled["trial_id"].n_unique()
        yield f"GPUs reported throttling in {throttled.height} blocks of {count} trials"
    for concurrency, reached in _crowds(blocks):
        if reached < _CROWDED * concurrency:
            yield f"{concurrency} requests at a time were asked for, but only {reached:.1f} shared a cycle on average"
    extra = sorted(evidence.filter(pl.col("grade") == "extra")["setting"].unique())
    if extra:
        yield f"set in the server, but not by the sweep: {', '.join(extra)}"
