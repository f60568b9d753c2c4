"""Logs of servers: recorded excerpts (0.5.16, 0.5.17, 0.5.21), and lines as SGLang writes them."""

from pathlib import Path

LOGS = Path(__file__).parents[3] / "assets" / "server_logs"


def read(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def log(*lines: str, rank: str = "TP0") -> str:
    return "\n".join(f"[2026-11-29 15:02:03 {rank}] {line}" for line in lines) + "\n"


def failing(exception: str, *, rank: str = "TP0", inner: str | None = None) -> str:
    frames = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
    chain = (
        f"{frames}{inner}\n\nThe above exception was the direct cause of the following exception:\n\n" if inner else ""
    )
    return f"[2026-11-29 15:02:06 {rank}] Scheduler hit an exception: {chain}{frames}{exception}\n\n"


STARTED = log(
    "Init torch distributed begin.", "Init torch distributed ends. elapsed=0.06 s", "Load weight begin. avail"
)


CAPTURING = STARTED + log(
    "Load weight end. elapsed=0.27 s, type=M", "Capture target verify CUDA graph begin. backend=full"
)
