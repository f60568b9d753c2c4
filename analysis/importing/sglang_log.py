"""An SGLang server's log, 0.5.0 to 0.5.23: decode windows, verify lines of a patched server, start and warnings.

A window is coarse: one line in some tens of steps. The first after a prefill holds the wait before it, so its
throughput is left out, but its accept length is sound. Lines are read as `key: value` pairs in any order, whatever
their prefix: the form changes from version to version. Ranks of one tensor-parallel group say the same, so the lowest
counts; data-parallel servers are kept apart by their prefix, and their rates are added up.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from analysis.importing.records import (
    MOST,
    MOST_AT_ONCE,
    MOST_TOKENS,
    ForeignBlock,
    ForeignRun,
    Reading,
    VerifyCycle,
    check_share,
)
from analysis.importing.server_arguments import Start, model_of

FORMAT = "SGLang server log"
THROUGHPUT = "decode windows of a server's log"
_DECODE = re.compile(r"\bDecode batch\b[^#]*?(?P<fields>#.*)?$")
_PREFILL = re.compile(r"\bPrefill batch\b")
_RANKS = re.compile(r"^\[[\d\-]+ [\d:.,]+(?P<ranks>(?: [A-Z]{2}\d+)*)\]")
_RANK = re.compile(r"([A-Z]{2})(\d+)")
_FIELD = re.compile(r"\s*(?P<key>[^:]+?)\s*:\s*(?P<value>\S+?)\s*$")
_VERIFY = re.compile(r"Target verify\s*:\s*(?P<rest>.*)$", re.IGNORECASE)
_VERIFY_VALUE = re.compile(
    r"(?P<ms>\d{1,7}(?:\.(?P<digits>\d{1,9}))?)\s*ms(?:\s*/\s*cyc\w*)?(?:\s*\(\s*(?P<share>\d{1,3}(?:\.\d{1,9})?)\s*%)?"
)
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?(?:e[-+]?\d{1,3})?", re.IGNORECASE)
_LEAST_TOK_S = 1e-3
_MOST_INTERVAL = 10_000
_DEFAULT_INTERVAL = 40
"""Decode steps between two lines (`--decode-log-interval`) if the log does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One decode line."""

    tok_s: float
    running: int
    accept_length: float | None
    """None if the line has none or says 0.0, which the server writes for "not known"."""
    accept_rate: float | None
    graph: bool | None
    after_prefill: bool

    @property
    def is_possible(self) -> bool:
        """Rates near zero are requests that ended in one batch; no cycle gives fewer than one token."""
        length = self.accept_length or 1.0
        return _LEAST_TOK_S <= self.tok_s <= MOST and 0 < self.running <= MOST_AT_ONCE and 1.0 <= length <= MOST_TOKENS


@dataclass(slots=True)
class Log:
    """Everything of one log that is of interest."""

    start: Start = field(default_factory=Start)
    windows: dict[int, list[Window]] = field(default_factory=lambda: defaultdict(list))
    """By the number of the data-parallel server."""
    verify: list[VerifyCycle] = field(default_factory=list)
    unparsed: int = 0
    speculates: bool = False
    """Some decode line has a place for the accept length."""
    _prefilled: dict[int, bool] = field(default_factory=dict)
    _first: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rank that wrote the first line of each server: its seconds count."""
    _told_by: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rank whose windows count."""

    def take(self, line: str) -> None:
        server, rank = _place(line)
        counts = rank == self._first.setdefault(server, rank) and server == next(iter(self._first))
        self.start.take(line, counts_seconds=counts)
        if _PREFILL.search(line):
            self._prefilled[server] = True
        elif (decode := _DECODE.search(line)) is not None:
            self._take_window(decode["fields"] or "", server, rank)
        elif (verify := _VERIFY.search(line)) is not None:
            self._take_verify(verify["rest"])

    def _take_window(self, text: str, server: int, rank: tuple[int, ...]) -> None:
        told = self._told_by.setdefault(server, rank)
        if rank > told:
            return
        if rank < told:  # what was taken so far was of a higher rank, which says the same
            self._told_by[server] = rank
            self.windows.pop(server, None)
        window = _window(text, after_prefill=self._prefilled.pop(server, server not in self.windows))
        self.speculates |= "accept len" in text
        if window is None:
            self.unparsed += 1
        else:
            self.windows[server].append(window)

    def _take_verify(self, text: str) -> None:
        found = _VERIFY_VALUE.match(text)
        share = None if found is None or found["share"] is None else float(found["share"]) / 100
        if found is None or float(found["ms"]) <= 0 or (share is not None and not 0 < share <= 1):
            self.unparsed += 1
            return
        unit_ms = 10.0 ** -len(found["digits"] or "")
        self.verify.append(VerifyCycle(verify_ms=float(found["ms"]), share=share, unit_ms=unit_ms))


def read_sglang_log(lines: Iterable[str], *, source: str) -> Reading:
    """Read a log. Raises ImportFileError without a line of interest, or with too many that are not understood."""
    log = Log()
    for line in lines:
        log.take(line)
    windows = [window for each in log.windows.values() for window in each]
    understood = len(windows) + len(log.verify)
    if understood + log.unparsed or not log.start.arguments:
        check_share(log.unparsed, understood + log.unparsed, what="`Decode batch` or `Target verify` lines")
    possible = [window for window in windows if window.is_possible]
    free = {
        name: [each for each in own if each.is_possible and not each.after_prefill] for name, own in log.windows.items()
    }
    num_free = sum(map(len, free.values()))
    start = log.start
    speculates = log.speculates or bool(log.verify)
    steps = min(start.whole("decode_log_interval") or _DEFAULT_INTERVAL, _MOST_INTERVAL)
    run = ForeignRun(
        origin=source,
        throughput=THROUGHPUT,
        drafting=start.drafting(seen=speculates),
        settings=start.settings(),
        blocks=tuple(_blocks(free, speculates=speculates, steps=steps)),
        accept_length=mean_accept_length(possible),
        verify=tuple(log.verify),
        engine_version=start.version,
        model=model_of(start.arguments),
        num_gpus=start.num_gpus(),
        boot_s=start.seconds,
        all_reduce=start.all_reduce(),
        events=tuple(start.events.values()),
    )
    notes = list(_notes(windows, possible, num_free, servers=len(log.windows), drafting=run.drafting.num_steps))
    if not understood:
        notes.append("no `Decode batch` line: this server has not generated")
    return Reading(
        source=source, format=FORMAT, runs=(run,), understood=understood, unparsed=log.unparsed, notes=tuple(notes)
    )


def mean_accept_length(windows: Sequence[Window]) -> float | None:
    """Over the windows that know it, weighted by running requests; None if none does."""
    known = [(each.accept_length, each.running) for each in windows if each.accept_length is not None]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def graph_share(windows: Sequence[Window]) -> float | None:
    """Share of the windows that ran in a captured graph; None if no line tells."""
    told = [each.graph for each in windows if each.graph is not None]
    return sum(told) / len(told) if told else None


def rate_meaning(windows: Sequence[Window], num_steps: int | None) -> str | None:
    """What the log's accept rate is: older servers divide by all verified tokens, newer ones by the draft tokens."""
    known = [each for each in windows if each.accept_rate and each.accept_length and each.accept_length > 1.05]
    if not known or not num_steps:
        return None
    votes = Counter(
        "accepted draft tokens / draft steps"
        if abs(each.accept_rate * num_steps - (each.accept_length - 1))
        < abs(each.accept_rate * (num_steps + 1) - each.accept_length)
        else "accept length / verified tokens"
        for each in known
        if each.accept_rate is not None and each.accept_length is not None
    )
    return votes.most_common(1)[0][0]


def _notes(
    windows: Sequence[Window], possible: Sequence[Window], num_free: int, *, servers: int, drafting: int | None
) -> Iterable[str]:
    if windows:
        yield (
            f"{num_free} windows used; left out: {len(possible) - num_free} with prefill or idle time, "
            f"{len(windows) - len(possible)} impossible"
        )
    if windows and not num_free:
        yield "no window is free of prefill and idle time, so there is no throughput: generate for longer"
    if servers > 1:
        yield f"{servers} data-parallel servers: their rates are added up"
    if (share := graph_share(possible)) is not None:
        yield f"{share:.0%} of the windows ran in captured graphs"
    if (meaning := rate_meaning(possible, drafting)) is not None:
        yield f"this log's accept rate is {meaning}"


def _place(line: str) -> tuple[int, tuple[int, ...]]:
    """The data-parallel server and the rank in it that wrote a line."""
    found = _RANKS.match(line)
    ranks = {} if found is None else {kind: int(number[:9]) for kind, number in _RANK.findall(found["ranks"])}
    return ranks.get("DP", 0), tuple(ranks.get(kind, 0) for kind in ("PP", "TP", "EP"))


def _window(text: str, *, after_prefill: bool) -> Window | None:
    fields = {
        found["key"].strip(): found["value"] for part in text.split(",") if (found := _FIELD.match(part)) is not None
    }
    rate = next((value for key, value in fields.items() if key.startswith("gen throughput")), None)
    running = fields.get("#running-req", "")
    if rate is None or not _NUMBER.fullmatch(rate) or not (running.isascii() and running.isdigit()):
        return None
    told = {name: fields.get(f"accept {name}", "0") for name in ("len", "rate")}
    if not all(_NUMBER.fullmatch(value) for value in told.values()):
        return None
    graph = next((value for key, value in fields.items() if key.endswith("graph")), None)
    return Window(
        tok_s=float(rate),
        running=int(running[:9]),
        accept_length=float(told["len"]) or None,
        accept_rate=float(told["rate"]) or None,
        graph=None if graph is None else graph == "True",
        after_prefill=after_prefill,
    )


def _blocks(free: dict[int, list[Window]], *, speculates: bool, steps: int) -> Iterable[ForeignBlock]:
    """Windows of a single server one by one, most frequent batch first; of several servers one sum of their medians."""
    used = [own for own in free.values() if own]
    if len(free) > 1:
        if len(used) == len(free):
            together = [each for own in used for each in own]
            yield _block(
                tok_s=sum(median(each.tok_s for each in own) for own in used),
                running=sum(round(median(each.running for each in own)) for own in used),
                accept_length=mean_accept_length(together),
                speculates=speculates,
                steps=steps * min(map(len, used)),
            )
        return
    for own in used:
        often = Counter(each.running for each in own)
        for running, _ in often.most_common():
            for each in own:
                if each.running == running:
                    yield _block(
                        tok_s=each.tok_s,
                        running=running,
                        accept_length=each.accept_length,
                        speculates=speculates,
                        steps=steps,
                    )


def _block(*, tok_s: float, running: int, accept_length: float | None, speculates: bool, steps: int) -> ForeignBlock:
    per_cycle = accept_length if speculates else 1.0
    cycle_ms = None if per_cycle is None else 1000.0 * running * per_cycle / tok_s
    tokens = steps * running * (per_cycle or 1.0)
    return ForeignBlock(
        concurrency=running,
        tok_s=tok_s,
        decode_s=tokens / tok_s,
        accept_length=accept_length if speculates else None,
        cycle_ms=cycle_ms,
    )
