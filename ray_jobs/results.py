"""Opening a sweep's results folder: new, or of the same spec; anything else is refused before a GPU second is spent."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import re
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sweeps import __version__
from sweeps.foreign_text import one_line
from sweeps.measure.records import Finding
from sweeps.measure.rows import record_findings
from sweeps.results.tables import SCHEMA_VERSION, ResultsFolder, TableError
from sweeps.results.writing import ForeignLinkError, refuse_links, replace_text
from sweeps.search.resume import Earlier
from sweeps.spec.document import SpecError
from sweeps.spec.hidden import redacted_text
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import fingerprint
from sweeps.spec.space import Space

_LOCK = "driver.lock"
_BEGUN = re.compile(r"driver\.lock|\.folder-id|spec\.yaml|\.(spec\.yaml|sweep\.json)\.[0-9a-f]+\.tmp|\.probe-\d+")
"""What a driver that died before it wrote the manifest leaves."""
_VERSIONS_OF = ("ray", "optuna", "pyarrow", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedResults:
    """A results folder that belongs to this spec, can be written, and is this driver's alone until `release`."""

    folder: ResultsFolder
    sweep_id: str
    resumed: bool
    lock: int
    """Descriptor of the locked file; the lock dies with the process."""

    def release(self) -> None:
        """Let another driver take the folder."""
        os.close(self.lock)


def default_root(spec: SweepSpec) -> Path:
    """`results/<sweep>-<timestamp>` below the working directory.

    A Ray job works in an unpacked copy that Ray deletes later: there it is below `~/specsweep-results`.
    """
    base = Path.home() / "specsweep-results" if _in_job() else Path("results")
    return base / f"{spec.sweep}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def _in_job() -> bool:
    """Whether this process works in the copy of a working directory that Ray unpacked for a job."""
    return "runtime_resources" in Path.cwd().parts


def open_results(root: Path, spec: SweepSpec, text: str, *, must_exist: bool = False) -> OpenedResults:
    """Create or resume a results folder.

    Args:
        text: of the spec; its fingerprint decides whose folder it is.
        must_exist: `--resume` was asked for.

    Raises SpecError if the folder cannot be written, holds something else, is a packed recording, or belongs to
    another spec or to another driver that is running.
    """
    if _in_job() and not root.is_absolute():
        raise SpecError(
            f"--results: {root} is relative, and a job works in a copy that Ray deletes later; "
            f"give an absolute path, {Path.home() / root} say"
        )
    folder = ResultsFolder(root.resolve())
    if folder.root.is_dir():
        _refuse_links(folder)
    if folder.manifest.is_file():
        return _resume(folder, text)
    if must_exist:
        raise SpecError(f"--resume: wanted a results folder, but {root} has no {folder.manifest.name}")
    if folder.root.is_dir() and not all(_BEGUN.fullmatch(path.name) for path in folder.root.iterdir()):
        raise SpecError(f"--results: {root} is neither empty nor a results folder (it has no {folder.manifest.name})")
    return _create(folder, spec, text)


def tell_damage(opened: OpenedResults, earlier: Earlier, rebuilt: str | None) -> None:
    """Print what was damaged in a folder that is gone on with, and leave an event for each.

    Args:
        rebuilt: what was wrong with the study's file.
    """
    findings = [Finding(event="damaged", detail=str(damage)) for damage in earlier.damaged]
    if rebuilt is not None:
        findings.append(Finding(event="study_rebuilt", detail=rebuilt))
    for finding in findings:
        print(one_line(f"{finding.event.replace('_', ' ')}: {finding.detail}"), flush=True)
    seen = list(earlier.observations)
    if seen and findings:
        at_s = max((block.started_s + block.wall_s for each in seen for block in each.blocks), default=0.0)
        record_findings(opened.folder, seen[-1].trial.trial_id, findings, sweep_id=opened.sweep_id, at_s=at_s)


def _resume(folder: ResultsFolder, text: str) -> OpenedResults:
    try:
        manifest = folder.read_manifest()
    except (TableError, ValueError) as error:
        raise SpecError(f"--results: {folder.manifest} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("sweep_id", ""), str):
        raise SpecError(f"--results: {folder.manifest} is not the manifest of a sweep")
    theirs, ours = manifest.get("spec_fingerprint"), fingerprint(text)
    if theirs != ours:
        raise SpecError(
            f"--results: {folder.root} holds the sweep of another spec (fingerprint {theirs}, this one has {ours}); "
            f"its spec is {folder.spec}. Take another folder, or that spec"
        )
    if folder.is_packed:
        raise SpecError(f"--results: {folder.root} is a packed recording, which cannot be resumed. Take another folder")
    _probe_writable(folder)
    lock = _lock(folder)
    return OpenedResults(folder=folder, sweep_id=str(manifest["sweep_id"]), resumed=True, lock=lock)


def _create(folder: ResultsFolder, spec: SweepSpec, text: str) -> OpenedResults:
    _probe_writable(folder)
    lock = _lock(folder)
    sweep_id = f"{spec.sweep}-{uuid.uuid4().hex[:8]}"
    manifest = {
        "sweep_id": sweep_id,
        "spec_fingerprint": fingerprint(text),
        "schema_version": SCHEMA_VERSION,
        "engine": spec.engine.kind,
        "machine": spec.engine.machine,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "target_tok_s": spec.target.tok_s,
        "num_configurations": len(Space(spec).configurations()),
    }
    try:
        replace_text(folder.spec, redacted_text(text))
        replace_text(folder.manifest, json.dumps(manifest, indent=2) + "\n")
    except OSError:
        os.close(lock)
        raise
    return OpenedResults(folder=folder, sweep_id=sweep_id, resumed=False, lock=lock)


def _lock(folder: ResultsFolder) -> int:
    path = folder.root / _LOCK
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        owner = path.read_text(encoding="utf-8").strip() or "unknown"
        raise SpecError(f"--results: {folder.root} is in use by a running driver ({owner})") from error
    try:
        os.truncate(lock, 0)
        os.write(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        os.close(lock)
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    return lock


def _refuse_links(folder: ResultsFolder) -> None:
    try:
        refuse_links(folder.root)
    except (ForeignLinkError, OSError) as error:
        raise SpecError(f"--results: {error}") from error


def _probe_writable(folder: ResultsFolder) -> None:
    probe = folder.root / f".probe-{os.getpid()}"
    try:
        folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise SpecError(f"--results: {folder.root} cannot be written: {error}") from error


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _VERSIONS_OF}
    return {"specsweep": __version__, "python": platform.python_version(), **versions}
