"""Logs of NCCL_DEBUG=INFO: which variables each rank has read, and what NCCL chose."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from analysis.importing.records import Event, ForeignRun, Reading, Seen, check_share
from sweeps.nccl.log import read_nccl_log

FORMAT = "NCCL_DEBUG log"
_LINE = re.compile(r"\bNCCL (?:INFO|WARN|TRACE)\b")
_PROCESS = re.compile(r"(?P<process>[\w.\-]+:\d+):\d+\s*(?:\[\d+\]\s)?.{0,200}?NCCL (?:INFO|WARN|TRACE)\b")
_VERSION = re.compile(r"\bNCCL version \d")
_MOST_OPERATIONS = 50


def is_nccl_line(line: str) -> bool:
    """Whether NCCL wrote this line."""
    return "NCCL" in line and (_LINE.search(line) is not None or _VERSION.search(line) is not None)


def read_nccl_debug(lines: Iterable[str], *, source: str) -> Reading:
    """Read a log of one process or of several; lines are told apart by `host:pid`. Raises ImportFileError."""
    processes: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        if is_nccl_line(line):
            found = _PROCESS.search(line)
            processes["" if found is None else found["process"]].append(line)
    understood = sum(map(len, processes.values()))
    check_share(0, understood, what="lines of NCCL")
    seen, events, versions = [], [], set()
    for number, own in enumerate(processes.values()):
        log = read_nccl_log("\n".join(own))
        rank = number if log.rank is None else log.rank
        versions |= {log.version} - {None}
        seen += [Seen(rank=rank, name=name, value=value) for name, value in log.set_by_environment.items()]
        events += [Event(name="nccl_warning", detail=f"rank {rank}: {text}") for text in log.warnings]
        events += [
            Event(name="nccl_refused", detail=f"rank {rank}: {name}, used {used}") for name, used in log.invalid.items()
        ]
        events += [
            Event(
                name="nccl_operation",
                detail=f"rank {rank}: {each.collective or 'collective'}, {each.num_bytes} bytes: "
                f"{each.algorithm} {each.protocol or 'symmetric'}",
            )
            for each in log.operations[:_MOST_OPERATIONS]
        ]
    run = ForeignRun(origin=source, throughput="none", seen=tuple(seen), events=tuple(events))
    notes = [f"{len(processes)} processes"]
    notes += [f"NCCL {', '.join(sorted(map(str, versions)))}"] if versions else []
    notes += [f"variables read: {', '.join(sorted({each.name for each in seen})) or 'none'}"]
    return Reading(source=source, format=FORMAT, runs=(run,), understood=understood, notes=tuple(notes))
