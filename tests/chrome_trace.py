"""Chrome traces as SGLang's profiler writes them, event by event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def event(category: str, name: str, start: float, length: float, **arguments: Any) -> dict[str, Any]:
    """One event, us."""
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": arguments}


def span(name: str, start: float, length: float) -> dict[str, Any]:
    """A phase on the GPU's timeline."""
    return event("gpu_user_annotation", name, start, length)


def kernel(name: str, start: float, length: float) -> dict[str, Any]:
    return event("kernel", name, start, length)


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"traceEvents": list(events)}))
    return path
