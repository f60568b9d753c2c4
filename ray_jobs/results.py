"""Opening a sweep's results folder: new, or of the same spec; anything else is refused before a GPU second is spent."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sweeps.spec import SpecError, SweepSpec, fingerprint
from sweeps.tables import SCHEMA_VERSION, ResultsFolder, TableError

_VERSIONS_OF = ("ray", "optuna", "pyarrow", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedResults:
    """A results folder that belongs to this spec and can be written."""

    folder: ResultsFolder
    sweep_id: str
    resumed: bool


def default_root(spec: SweepSpec) -> Path:
    """`results/<sweep>-<timestamp>` below the working directory."""
    return Path("results") / f"{spec.sweep}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def open_results(root: Path, spec: SweepSpec, text: str, *, must_exist: bool = False) -> OpenedResults:
    """Create or resume a results folder.

    Args:
        text: of the spec; its fingerprint decides whose folder it is.
        must_exist: `--resume` was asked for.

    Raises SpecError where the folder cannot be written, holds something else or belongs to another spec.
    """
    folder = ResultsFolder(root.resolve())
    if folder.manifest.is_file():
        return _resume(folder, text)
    if must_exist:
        raise SpecError(f"--resume: wanted a results folder, but {root} has no {folder.manifest.name}")
    if folder.root.is_dir() and any(folder.root.iterdir()):
        raise SpecError(f"--results: {root} is neither empty nor a results folder (it has no {folder.manifest.name})")
    return _create(folder, spec, text)


def _resume(folder: ResultsFolder, text: str) -> OpenedResults:
    try:
        manifest = folder.read_manifest()
    except (TableError, ValueError) as error:
        raise SpecError(f"--results: {folder.manifest} cannot be read: {error}") from error
    theirs, ours = manifest.get("spec_fingerprint"), fingerprint(text)
    if theirs != ours:
        raise SpecError(
            f"--results: {folder.root} holds the sweep of another spec (fingerprint {theirs}, this one has {ours}); "
            f"its spec is {folder.spec}. Take another folder, or that spec"
        )
    _probe_writable(folder)
    return OpenedResults(folder=folder, sweep_id=str(manifest["sweep_id"]), resumed=True)


def _create(folder: ResultsFolder, spec: SweepSpec, text: str) -> OpenedResults:
    _probe_writable(folder)
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
    }
    folder.spec.write_text(text, encoding="utf-8")
    temporary = folder.manifest.with_suffix(".tmp")
    temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    temporary.rename(folder.manifest)
    return OpenedResults(folder=folder, sweep_id=sweep_id, resumed=False)


def _probe_writable(folder: ResultsFolder) -> None:
    probe = folder.root / f".probe-{os.getpid()}"
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise SpecError(f"--results: {folder.root} cannot be written: {error}") from error


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _VERSIONS_OF}
    return {"python": platform.python_version(), **versions}
