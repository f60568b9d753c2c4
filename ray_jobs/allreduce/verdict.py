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
MAX_LAUNCH_DIFFERENCE = 0.10
"""Share by which launches of one and the same choice were seen to differ: 9.8 %, two H200, NCCL 2.28.9
(`recordings/nccl_allreduce_h200_x2`), in two modes. The least difference where a table tells its own noise poorly."""
ENOUGH_LAUNCHES = 5
"""Of one choice, to have seen both of two equally likely modes in 15 of 16 tables."""
SHOWN_BY_CHOICE = frozenset(
    {
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_P2P_LEVEL",
        "NCCL_P2P_DISABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_CTAS",
        "NCCL_MAX_CTAS",
    }
)
"""Variables that do nothing but change algorithm, protocol, channels or transport: an equal choice is an equal launch.
Others (threads, buffers) may act behind an equal choice."""

_OWN = (DEFAULT_SET, DEFAULT_AGAIN)

Verdict = Literal["faster", "slower", "faster and slower", "same", "failed", "no default to compare with"]
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SetVerdict:
    """One set against `default`, over all sizes of one mode."""

    name: str
    verdict: Verdict
    detail: str
    gain_us: Mapping[int, float]
    """Tokens -> median of the default minus median of this set, where the difference is no launch noise."""

    @property
    def could_matter(self) -> bool:
        return bool(self.gain_us)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Default:
    """The default's choice in all its launches; dictionaries by tokens."""

    choice: Mapping[int, tuple[Any, ...]]
    """Only where NCCL's log told it."""
    base: Mapping[int, Mapping[str, float]]
    """Over the launches: mean of medians, union of spreads (p10 to p90)."""
    launches: int
    """At the size that has the fewest; 0 where the log told no choice, as is `noise`."""
    noise: float
    """The largest ratio of two medians of one size, less one."""


def judge_sets(rows: Sequence[Row]) -> tuple[SetVerdict, ...]:
    """One verdict per set, in the order of the table, on CUDA-graph replay where it was measured, else eager.

    A set is `slower` or `faster` at a size where its spread does not meet the default's and the medians differ by more
    than `MIN_DIFFERENCE`. Where NCCL's log tells what it chose, sets that choose as the default does and can do nothing
    else are `same`: launches of the default, whose largest difference (`MAX_LAUNCH_DIFFERENCE`, if larger, where the
    table has few of them) is noise that every other set must exceed.
    """
    mode = _mode(rows)
    default = _default(rows, mode)
    return tuple(_judge(name, rows, mode, default) for name in _names(rows) if name not in _OWN)


def launch_noise(rows: Sequence[Row]) -> float | None:
    """By what share launches of the default's choice differ at most; None where NCCL's log told no choice."""
    default = _default(rows, _mode(rows))
    return default.noise if default.choice else None


def _judge(name: str, rows: Sequence[Row], mode: str, default: _Default) -> SetVerdict:
    bad = next((row for row in rows if row["set"] == name and row["outcome"] != "ok"), None)
    if bad is not None:
        return SetVerdict(name=name, verdict="failed", detail=f"{bad['outcome']}: {bad['reason']}", gain_us={})
    if not default.base:
        return SetVerdict(name=name, verdict="no default to compare with", detail="", gain_us={})
    own = _by_tokens(rows, name, mode)
    gain_us = {
        tokens: default.base[tokens]["us_median"] - row["us_median"]
        for tokens, row in own.items()
        if tokens in default.base and _differs(row, default)
    }
    faster, slower = any(gain > 0 for gain in gain_us.values()), any(gain < 0 for gain in gain_us.values())
    verdict: Verdict = (
        "faster and slower" if faster and slower else "faster" if faster else "slower" if slower else "same"
    )
    per_forward = {tokens: gain * ALL_REDUCES_PER_FORWARD / 1000 for tokens, gain in gain_us.items()}
    detail = ", ".join(f"{tokens} tok {-ms:+.2f} ms" for tokens, ms in per_forward.items())
    return SetVerdict(name=name, verdict=verdict, detail=detail or _why_same(own, default), gain_us=gain_us)


def _differs(row: Row, default: _Default) -> bool:
    base, least = default.base[row["tokens"]], max(MIN_DIFFERENCE, default.noise)
    equal = _chooses_as(row, default)
    if equal and _shown_by_choice(row):
        return False
    if equal or 0 < default.launches < ENOUGH_LAUNCHES:
        least = max(least, MAX_LAUNCH_DIFFERENCE)
    meet = base["us_p10"] <= row["us_p90"] and row["us_p10"] <= base["us_p90"]
    return not meet and abs(row["us_median"] / base["us_median"] - 1) > least


def _why_same(own: Mapping[int, Row], default: _Default) -> str:
    equal = [tokens for tokens, row in own.items() if _chooses_as(row, default)]
    if not equal:
        return ""
    where = "" if len(equal) == len(own) else f" at {', '.join(map(str, equal))} tok"
    return f"NCCL makes its default choice{where}; launches of the default differ by up to {default.noise:.1%}"


def _default(rows: Sequence[Row], mode: str) -> _Default:
    first = _by_tokens(rows, DEFAULT_SET, mode)
    choice = {tokens: seen for tokens, row in first.items() if (seen := _seen_choice(row)) is not None}
    alone = _Default(choice=choice, base={}, launches=0, noise=0.0)
    launches: dict[int, list[Row]] = {tokens: [] for tokens in first}
    for name in _names(rows):
        for tokens, row in _by_tokens(rows, name, mode).items():
            if tokens in launches and (name in _OWN or (_chooses_as(row, alone) and _shown_by_choice(row))):
                launches[tokens].append(row)
    ratios = [_ratio([row["us_median"] for row in launches[tokens]]) for tokens in choice]
    return _Default(
        choice=choice,
        base={tokens: _merged(found) for tokens, found in launches.items()},
        launches=min((len(launches[tokens]) for tokens in choice), default=0),
        noise=max(ratios, default=1.0) - 1.0,
    )


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["set"] for row in rows))


def _mode(rows: Sequence[Row]) -> str:
    return "graph" if any(row.get("mode") == "graph" for row in rows) else "eager"


def _by_tokens(rows: Sequence[Row], name: str, mode: str) -> dict[int, Row]:
    return {
        row["tokens"]: row for row in rows if row["set"] == name and row.get("mode") == mode and row["outcome"] == "ok"
    }


def _merged(rows: Sequence[Row]) -> dict[str, float]:
    return {
        "us_median": sum(row["us_median"] for row in rows) / len(rows),
        "us_p10": min(row["us_p10"] for row in rows),
        "us_p90": max(row["us_p90"] for row in rows),
    }


def _ratio(medians_us: Sequence[float]) -> float:
    return max(medians_us) / min(medians_us)


def _seen_choice(row: Row) -> tuple[Any, ...] | None:
    """Algorithm, protocol, channels, transports; None where NCCL's log does not tell."""
    if not row.get("algorithm"):
        return None
    return row["algorithm"], row["protocol"], row["channels"], frozenset(row.get("transports") or ())


def _chooses_as(row: Row, default: _Default) -> bool:
    seen = _seen_choice(row)
    return seen is not None and seen == default.choice.get(row["tokens"])


def _shown_by_choice(row: Row) -> bool:
    """Whether an equal choice leaves nothing that the set could still change."""
    read = set(dict(row["env"])) - set(row.get("unread") or ())
    return read <= SHOWN_BY_CHOICE


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
    if (noise := launch_noise(rows)) is not None:
        console.print(
            f"Launches with NCCL's default choice differ by up to {noise:.1%}; smaller differences are noise."
        )
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
