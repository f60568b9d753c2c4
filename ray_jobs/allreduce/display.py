"""The all-reduce table for a reader: medians, NCCL's choices, and what each set could do to a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ray_jobs.allreduce.paired import differences, is_paired
from ray_jobs.allreduce.set_rows import ALL_REDUCES_PER_FORWARD
from ray_jobs.allreduce.verdict import judge_sets, noise_sentence


def render(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print one table of medians per mode, then what each set could do to a forward pass."""
    for mode in dict.fromkeys(row["mode"] for row in rows if row.get("mode")):
        console.print(_medians(rows, mode))
    if any(row.get("algorithm") for row in rows):
        console.print(_choices(rows))
    if is_paired(rows):
        console.print(_differences(rows))
    verdicts = judge_sets(rows)
    table = Table(
        title=f"against default; ms per forward of {ALL_REDUCES_PER_FORWARD} all-reduces", title_justify="left"
    )
    for column in ("set", "verdict", "difference (minus: faster)"):
        table.add_column(column, overflow="fold")
    for verdict in verdicts:
        table.add_row(verdict.name, verdict.verdict, verdict.detail)
    console.print(table)
    if (noise := noise_sentence(rows)) is not None:
        console.print(noise)
    console.print(f"Sets that could matter: {', '.join(v.name for v in verdicts if v.could_matter) or 'none'}.")
    console.print(
        "This is NCCL alone. If another kernel does the server's all-reduces (SGLang's own, on NVLink), no set matters."
    )


def _medians(rows: Sequence[Mapping[str, Any]], mode: str) -> Table:
    chosen = [row for row in rows if row.get("mode") == mode]
    first = chosen[0]
    where = first.get("gpu_name") or "CPU"
    library = " ".join(filter(None, (first["backend"], first.get("nccl_version"))))
    title = f"all-reduce, {mode}, {first['world_size']} x {where}, {library}: median us (p10-p90)"
    table = Table(title=title, title_justify="left")
    table.add_column("set", overflow="fold")
    sizes = sorted({row["tokens"] for row in chosen})
    for tokens in sizes:
        table.add_column(f"{tokens} tok", justify="right")
    for communicator in dict.fromkeys(map(_communicator, rows)):
        cells = {row["tokens"]: _cell(row) for row in chosen if _communicator(row) == communicator}
        table.add_row(communicator, *(cells.get(tokens, "-") for tokens in sizes))
    return table


def _communicator(row: Mapping[str, Any]) -> str:
    """The set, with a number from its second communicator on."""
    return f"{row['set']} #{row['copy'] + 1}" if row.get("copy") else str(row["set"])


def _differences(rows: Sequence[Mapping[str, Any]]) -> Table:
    """By what share each set's time exceeds the default's, its communicators averaged."""
    found = differences(rows)
    sizes = sorted({tokens for by_tokens in found.values() for tokens in by_tokens})
    title = "difference to the default, paired by round (95 % interval over the rounds)"
    table = Table(title=title, title_justify="left")
    table.add_column("set", overflow="fold")
    for tokens in sizes:
        table.add_column(f"{tokens} tok", justify="right")
    for name, by_tokens in found.items():
        table.add_row(name, *(str(by_tokens.get(tokens, "-")) for tokens in sizes))
    return table


def _choices(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Algorithm, protocol and channels by size, as NCCL logged them."""
    table = Table(title="NCCL's choice, from its log", title_justify="left")
    sizes = sorted({row["tokens"] for row in rows if row.get("tokens")})
    for column in ("set", *(f"{tokens} tok" for tokens in sizes), "transports", "not read"):
        table.add_column(column, overflow="fold")
    for name in dict.fromkeys(row["set"] for row in rows if row.get("transports") is not None):
        own = [row for row in rows if row["set"] == name]
        by_tokens = {row["tokens"]: _choice(row) for row in own if row.get("algorithm")}
        cells = [by_tokens.get(tokens, "-") for tokens in sizes]
        table.add_row(name, *cells, ", ".join(own[0]["transports"]), ", ".join(own[0]["unread"]))
    return table


def _choice(row: Mapping[str, Any]) -> str:
    channels = f" x{row['channels']}" if row["channels"] else ""
    return f"{row['algorithm']} {row['protocol'] or ''}".strip() + channels


def _cell(row: Mapping[str, Any]) -> str:
    if row["outcome"] != "ok":
        return str(row["outcome"])
    return f"{row['us_median']:.1f} ({row['us_p10']:.1f}-{row['us_p90']:.1f})"
