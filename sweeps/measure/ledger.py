"""Where the seconds of held GPUs went. Every second between two marks belongs to exactly one activity."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sweeps.results.tables import ACTIVITIES, Activity


class Ledger:
    """Charges an engine's clock to activities. Multiply by the number of GPUs for GPU seconds.

    Args:
        now_s: the engine's clock.
        since_s: when the account begins (the end of the last trial on the same GPUs, so that idling shows).
    """

    def __init__(self, now_s: Callable[[], float], *, since_s: float) -> None:
        self._now_s = now_s
        self._mark_s = since_s
        self._seconds: dict[str, float] = dict.fromkeys(ACTIVITIES, 0.0)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by activity, every activity present."""
        return dict(self._seconds)

    @property
    def mark_s(self) -> float:
        """Everything before this time is charged."""
        return self._mark_s

    def charge(self, activity: Activity) -> float:
        """Give everything since the last mark to one activity. Returns the seconds."""
        now_s = self._now_s()
        spent = now_s - self._mark_s
        self._seconds[activity] += spent
        self._mark_s = now_s
        return spent

    def charge_boot(self, boot_s: Mapping[str, float]) -> float:
        """Split everything since the last mark by the server's own account of its boot.

        What the account does not cover (process start, checks) is `launch`; an account longer than the wall time is
        scaled down to it. Raises ValueError for an activity that the tables do not know.
        """
        spent = self.charge("launch")
        parts = {activity: seconds for activity, seconds in boot_s.items() if activity != "launch"}
        unknown = sorted(set(parts) - set(ACTIVITIES))
        if unknown:
            raise ValueError(f"boot_s: wanted activities of {', '.join(ACTIVITIES)}, got {', '.join(unknown)}")
        total = sum(parts.values())
        scale = min(1.0, spent / total) if total > 0 else 0.0
        for activity, seconds in parts.items():
            self._seconds[activity] += seconds * scale
            self._seconds["launch"] -= seconds * scale
        return spent
