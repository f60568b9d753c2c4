"""Keeps the cycles of one rank: a few marks each on the hot path, arithmetic later, while the server is idle."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

PENDING_LIMIT = 4096
"""Unread cycles from which on each new one also reads the oldest: bounds the events alive in a long block."""
RESULT_LIMIT = 200_000
_SETTLE_S = 5.0

COLUMNS = (
    "started_ms",
    "draft_ms",
    "verify_ms",
    "verify_forward_ms",
    "extend_ms",
    "gap_ms",
    "cycle_ms",
    "batch_size",
    "num_steps",
    "tokens",
)


class Cycle:
    """One draft -> verify -> draft-extend round, or one plain decode step, as marks."""

    __slots__ = (
        "batch_size",
        "draft_end",
        "end",
        "extend_end",
        "extend_start",
        "follows",
        "forward_end",
        "forward_start",
        "num_steps",
        "start",
        "started_s",
        "tokens",
        "verify_end",
        "verify_start",
    )

    def __init__(self, start: Any, batch_size: int, *, follows: bool) -> None:
        self.started_s = time.monotonic()
        self.start = start
        self.batch_size = batch_size
        self.follows = follows
        """The cycle before ended where this one began: no prefill came between."""
        self.num_steps = 0
        self.tokens: int | None = None
        self.draft_end = self.verify_start = self.verify_end = self.end = None
        self.forward_start = self.forward_end = self.extend_start = self.extend_end = None

    def marks(self) -> list[Any]:
        every = (
            self.start, self.draft_end, self.verify_start, self.verify_end, self.forward_start, self.forward_end,
            self.extend_start, self.extend_end, self.end,
        )  # fmt: skip
        return list({id(mark): mark for mark in every if mark is not None}.values())


class Recorder:
    """Filled by the scheduler's thread, emptied by the control thread while the server is idle."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.recording = True
        self.open: Cycle | None = None
        self._follows = False
        self._ran: set[str] = set()
        """States that cycles ran in."""
        self._pending: deque[Cycle] = deque()
        self._untold: deque[Cycle] = deque()
        self._results: list[tuple[Any, ...]] = []
        self._dropped = 0

    def begin(self, batch_size: int) -> Cycle:
        if len(self._pending) >= PENDING_LIMIT:
            self._read_oldest(self._pending[1] if len(self._pending) > 1 else None)
        cycle = Cycle(self.clock.mark(), batch_size, follows=self._follows)
        self._follows = True
        self.open = cycle
        return cycle

    def end(self, cycle: Cycle, *, num_steps: int, tokens: int | None, state: str | None = None) -> None:
        """`tokens` None: they will be told later, in the order of the cycles."""
        if state is not None:
            self._ran.add(state)
        cycle.num_steps = num_steps
        cycle.tokens = tokens
        if cycle.end is None:
            cycle.end = self.clock.mark()
        self.open = None
        if tokens is None:
            self._untold.append(cycle)
        self._pending.append(cycle)

    def tell(self, tokens: int) -> None:
        """Tokens of the oldest cycle that has none yet."""
        if self._untold:
            self._untold.popleft().tokens = tokens

    def interrupt(self) -> None:
        """Something else than a cycle ran: the next cycle does not follow the last."""
        self._follows = False

    def forget(self) -> None:
        """Drop everything so far."""
        self._settle()
        while self._pending:
            self.clock.release(self._pending.popleft().marks())
        self._untold.clear()
        self._ran = set()
        self._results = []
        self._dropped = 0

    def take(self) -> dict[str, Any]:
        """All cycles since the last call, by column, and how many were lost; waits for the device to pass them."""
        self._settle()
        while self._pending:
            self._read_oldest(self._pending[1] if len(self._pending) > 1 else None)
        self._follows = False
        rows, self._results = self._results, []
        dropped, self._dropped = self._dropped, 0
        ran, self._ran = sorted(self._ran), set()
        columns = {name: [row[position] for row in rows] for position, name in enumerate(COLUMNS)}
        return {"timer_kind": self.clock.kind, "dropped": dropped, "states": ran, "cycles": columns}

    def _settle(self) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            last = self._pending[-1].end if self._pending else None
            if self.open is None and not self._untold and (last is None or self.clock.is_done(last)):
                return
            time.sleep(0.002)

    def _read_oldest(self, successor: Cycle | None) -> None:
        cycle = self._pending.popleft()
        elapsed = self.clock.elapsed_ms
        follower = successor.start if successor is not None and successor.follows else cycle.end
        cycle_ms = elapsed(cycle.start, follower)
        draft = elapsed(cycle.start, cycle.draft_end) if cycle.draft_end is not None else None
        verify = elapsed(cycle.verify_start, cycle.verify_end) if cycle.verify_end is not None else None
        forward = elapsed(cycle.forward_start, cycle.forward_end) if cycle.forward_end is not None else None
        extend = elapsed(cycle.extend_start, cycle.extend_end) if cycle.extend_end is not None else None
        phases = (draft, verify, extend) if verify is not None else (forward,)
        gap = cycle_ms - sum(phase for phase in phases if phase is not None)
        times = (cycle.started_s * 1000.0, draft, verify, forward, extend, gap, cycle_ms)
        if len(self._results) < RESULT_LIMIT:
            self._results.append((*times, cycle.batch_size, cycle.num_steps, cycle.tokens))
        else:
            self._dropped += 1
        self.clock.release(cycle.marks())
