"""What an all-reduce table allows one to say: which NCCL sets differ from the default at decode sizes, by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

DEFAULT_SET = "default"
DEFAULT_AGAIN = "default (again)"
"""The default's variables in a second launch: widens its spread by what differs from launch to launch."""
ALL_REDUCES_PER_FORWARD = 122
"""Two per layer, attention and MLP, in 61 layers: Kimi-K2.5 and DeepSeek-V3 under tensor parallelism."""
MIN_DIFFERENCE = 0.03
"""Share of the default's median below which a difference is not worth a trial."""

Verdict = Literal["faster", "slower", "faster and slower", "same", "failed", "no default to compare with"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SetVerdict:
    """One set against `default`, over all sizes of one mode."""

    name: str
    verdict: Verdict
    detail: str
    gain_us: Mapping[int, float]
    """Tokens -> median of the default minus median of this set, where the two spreads (p10 to p90) do not meet."""

    @property
    def could_matter(self) -> bool:
        return bool(self.gain_us)


def judge_sets(rows: Sequence[Mapping[str, Any]]) -> tuple[SetVerdict, ...]:
    """One verdict per set, in the order of the table; CUDA-graph replay where it was measured, else eager."""
    mode = "graph" if any(row.get("mode") == "graph" for row in rows) else "eager"
    names = list(dict.fromkeys(row["set"] for row in rows))
    return tuple(_judge(name, rows, mode) for name in names if name not in (DEFAULT_SET, DEFAULT_AGAIN))


def _judge(name: str, rows: Sequence[Mapping[str, Any]], mode: str) -> SetVerdict:
    bad = next((row for row in rows if row["set"] == name and row["outcome"] != "ok"), None)
    if bad is not None:
        return SetVerdict(name=name, verdict="failed", detail=f"{bad['outcome']}: {bad['reason']}", gain_us={})
    base, own = _default(rows, mode), _by_tokens(rows, name, mode)
    if not base:
        return SetVerdict(name=name, verdict="no default to compare with", detail="", gain_us={})
    gain_us = {
        tokens: base[tokens]["us_median"] - own[tokens]["us_median"]
        for tokens in own
        if tokens in base and _apart(base[tokens], own[tokens])
    }
    faster, slower = any(gain > 0 for gain in gain_us.values()), any(gain < 0 for gain in gain_us.values())
    verdict: Verdict = (
        "faster and slower" if faster and slower else "faster" if faster else "slower" if slower else "same"
    )
    per_forward = {tokens: gain * ALL_REDUCES_PER_FORWARD / 1000 for tokens, gain in gain_us.items()}
    detail = ", ".join(f"{tokens} tok {-ms:+.2f} ms" for tokens, ms in per_forward.items())
    return SetVerdict(name=name, verdict=verdict, detail=detail, gain_us=gain_us)


def _by_tokens(rows: Sequence[Mapping[str, Any]], name: str, mode: str) -> dict[int, Mapping[str, Any]]:
    return {
        row["tokens"]: row for row in rows if row["set"] == name and row.get("mode") == mode and row["outcome"] == "ok"
    }


def _default(rows: Sequence[Mapping[str, Any]], mode: str) -> dict[int, Mapping[str, Any]]:
    """The default by tokens; over both its launches where there are two: mean of medians, union of spreads."""
    first, again = _by_tokens(rows, DEFAULT_SET, mode), _by_tokens(rows, DEFAULT_AGAIN, mode)
    return {tokens: _merged(row, again[tokens]) if tokens in again else row for tokens, row in first.items()}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    return {
        "us_median": (one["us_median"] + other["us_median"]) / 2,
        "us_p10": min(one["us_p10"], other["us_p10"]),
        "us_p90": max(one["us_p90"], other["us_p90"]),
    }


def _apart(base: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    meet = base["us_p10"] <= own["us_p90"] and own["us_p10"] <= base["us_p90"]
    return not meet and abs(own["us_median"] / base["us_median"] - 1) > MIN_DIFFERENCE


def plain_console() -> Console:
    """A console whose tables keep their columns in a job log, which has no width of its own."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def render(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print one table of medians per mode, then what each set could do to a forward pass."""
    for mode in dict.fromkeys(row["mode"] for row in rows if row.get("mode")):
        console.print(_medians(rows, mode))
    if any(row.get("algorithm") for row in rows):
        console.print(_choices(rows))
    verdicts = judge_sets(rows)
    table = Table(
        title=f"against default; ms per forward of {ALL_REDUCES_PER_FORWARD} all-reduces", title_justify="left"
    )
    for column in ("set", "verdict", "difference (minus: faster)"):
        table.add_column(column, overflow="fold")
    for verdict in verdicts:
        table.add_row(verdict.name, verdict.verdict, verdict.detail)
    console.print(table)
    console.print(f"Sets that could matter: {', '.join(v.name for v in verdicts if v.could_matter) or 'none'}.")
    console.print(
        "This is NCCL alone: where the server reduces by other means (NVLink: custom all-reduce), no set matters."
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
    for name in dict.fromkeys(row["set"] for row in rows):
        cells = {row["tokens"]: _cell(row) for row in chosen if row["set"] == name}
        table.add_row(name, *(cells.get(tokens, "-") for tokens in sizes))
    return table


def _choices(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Algorithm, protocol and channels by size, as NCCL logged them."""
    table = Table(title="NCCL's choice, from its log (untimed run)", title_justify="left")
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
