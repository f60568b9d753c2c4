"""What the ranks of the all-reduce table wrote so far, one JSON line per record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Where a rank is. Ranks pass the same stages; equal steps are the same stage."""

    name: str = "start"
    member: int | None = None
    """The communicator that it is busy with; None before the first and after the last."""
    step: int = 0


class RankJournal:
    """Records of one rank. A killed rank may leave half a line: complete lines only."""

    def __init__(self, path: Path, *, now_s: float) -> None:
        self._path = path
        self._offset = 0
        self.records: list[Mapping[str, Any]] = []
        self.stage = Stage()
        self.since_s = now_s
        """When the rank was first seen in its stage; or later, up to the time between two `read`s."""

    def read(self, now_s: float) -> None:
        """Take in what was written since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            record = json.loads(line)
            self.records.append(record)
            if "stage" in record:
                self.stage = Stage(name=record["stage"], member=record.get("member"), step=record["step"])
                self.since_s = now_s

    def of(self, key: str) -> Iterator[Any]:
        """Values of the records of one kind."""
        return (record[key] for record in self.records if key in record)
