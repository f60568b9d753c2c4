"""Every file name of a results folder, and who may be named in one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.results.part_file import TableError

_TRIAL_ID = re.compile(r"[a-z][0-9]+(?:-[a-z0-9]+)*")
PART_NAME = re.compile(r"([kti]\d{4,})(?:-[a-z0-9]+)*-a(\d+)(?:\.|$)")
"""Trial id and attempt in the name of a part, a journal or a log."""


@dataclass(frozen=True, slots=True)
class ResultsFolder:
    """Owns every file name of a results folder."""

    root: Path

    @property
    def spec(self) -> Path:
        return self.root / "spec.yaml"

    @property
    def manifest(self) -> Path:
        """`sweep_id`, `spec_fingerprint`, `schema_version`, `engine`, `created_at`, `versions`, `target_tok_s`,
        `num_configurations` (of the valid space)."""
        return self.root / "sweep.json"

    @property
    def study(self) -> Path:
        return self.root / "study.journal"

    def names_in_use(self) -> frozenset[str]:
        """Trial ids that some file of the folder bears, readable or not: none of them is given to a new trial."""
        places = [*(self.root / "tables").glob("*/*"), *(self.root / "journal").glob("*"), *self._logs.glob("*")]
        return frozenset(found[1] for path in places if (found := PART_NAME.match(path.name)) is not None)

    @property
    def _logs(self) -> Path:
        return self.root / "logs"

    @property
    def stop_request(self) -> Path:
        """Exists while the driver is asked to end: whoever waits for a server then gives up at once."""
        return self.root / "stop-requested"

    @property
    def tune(self) -> Path:
        return self.root / "tune"

    def part(self, table: str, trial_id: str, attempt: int) -> Path:
        return self.root / "tables" / table / f"{_file_name(trial_id, attempt)}.parquet"

    def packed(self, table: str) -> Path:
        """The only part of a table in a packed recording (`benchmarks.pack_recording`)."""
        return self.root / "tables" / table / "sweep.parquet"

    @property
    def is_packed(self) -> bool:
        """A packed recording is read, never written: parts of single trials are not found in it."""
        packed = self.packed("trials")
        return packed.is_file() and not has_named_parts(packed.parent.glob("*.parquet"))

    def journal(self, trial_id: str, attempt: int) -> Path:
        """What Parquet does not yet hold while a trial runs."""
        return self.root / "journal" / f"{_file_name(trial_id, attempt)}.jsonl"

    def logs(self, trial_id: str, attempt: int) -> Path:
        return self._logs / _file_name(trial_id, attempt)

    def read_manifest(self) -> dict[str, Any]:
        if not self.manifest.is_file():
            raise TableError(f"{self.root}: wanted a results folder, but it has no {self.manifest.name}")
        manifest: dict[str, Any] = json.loads(self.manifest.read_text(encoding="utf-8"))
        return manifest


def _file_name(trial_id: str, attempt: int) -> str:
    """Raises TableError for what is no trial id: a journal that somebody else wrote could name a path."""
    if not isinstance(attempt, int) or not isinstance(trial_id, str) or _TRIAL_ID.fullmatch(trial_id) is None:
        raise TableError(f"wanted a trial id such as t0001 and the number of an attempt, got {trial_id!r}, {attempt!r}")
    return f"{trial_id}-a{attempt:d}"


def has_named_parts(paths: Iterable[Path]) -> bool:
    """Whether parts of single attempts are among the files: a packed part has none beside it."""
    return any(PART_NAME.fullmatch(path.stem) for path in paths)
