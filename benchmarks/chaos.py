"""Chaos: a sweep over a server that misbehaves at random, its driver killed three times. `python -m benchmarks.chaos`.

The real engine runs the stub server (`tests/stub_server.py`), so processes, ports, logs and leases are real and nothing
is measured. Before the second kill of the driver a guard is killed too. At the end: every trial has exactly one final
row, no process, port or lease is left, and two bystanders with the server's command line got no signal. Exits 1 where
any of that does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.record import record
from sweeps.engines.process import lease
from sweeps.engines.sglang.boot import free_port
from sweeps.results.tables import ResultsFolder, read_parts, read_table

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "tests" / "stub_server.py"
FAULTS = (
    "none",
    "crash_at_load",
    "gpu_oom",
    "host_oom",
    "no_algorithm",
    "bad_argument",
    "hang_at_init",
    "hang_at:draft_init",
    "slow_ready:1",
    "dead_verify",
    "crash_in_block:1",
    "crash_in_block:2",
    "hang_in_block:1",
    "unauthorised",
    "ignore_sigterm",
    "daemon",
    "daemon,gpu_oom",
    "override:NCCL_PROTO=Simple",
    "inject:NCCL_P2P_LEVEL=SYS",
    "protocol:Simple",
    "draft_tokens",
    "draft_inert",
    "wrong_output",
    "no_handshake",
    "half_cycles",
)
NUM_GPUS = 2
"""Logical ones: the stub has no kernels."""
_POLL_S = 0.5
_SETTLE_S = 60.0
_BYSTANDER = """
import signal, sys, time
def note(number, frame):
    print(number, flush=True)
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, note)
print("up", flush=True)
while True:
    time.sleep(3600)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One promise and whether it was kept."""

    promise: str
    kept: bool
    detail: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="A sweep under random faults.")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--kills", type=int, default=3, help="how often the driver is killed (SIGKILL)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder to work in and to keep (default: a temporary one)")
    arguments = parser.parse_args(argv)
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        return _chaos(arguments.keep.resolve(), arguments.trials, arguments.kills, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        return _chaos(Path(folder), arguments.trials, arguments.kills, arguments.seed)


def _chaos(folder: Path, trials: int, kills: int, seed: int) -> int:
    spec = folder / "chaos.yaml"
    spec.write_text(yaml.safe_dump(chaos_spec(trials, seed), sort_keys=False), encoding="utf-8")
    results = ResultsFolder(folder / "results")
    rng = random.Random(seed)
    started_s = time.monotonic()
    with _bystanders(folder) as bystanders, _cluster(folder) as address:
        sweep = _Sweep(spec, results, folder, address)
        for number in range(1, kills + 1):
            at = trials * number // (kills + 1) + rng.randrange(max(trials // 20, 1))
            killed = _run_until(sweep, num_trials=at, resume=number > 1, guard_too=number % 2 == 0)
            print(f"{time.monotonic() - started_s:6.0f} s  {_num_trials(results)} trials, driver {killed}", flush=True)
        code = sweep.start(resume=kills > 0).wait()
        print(f"{time.monotonic() - started_s:6.0f} s  {_num_trials(results)} trials, driver ended with {code}")
        findings = [*check_rows(results, trials), *check_leftovers(folder), *_check_bystanders(folder, bystanders)]
    outcomes = _outcomes(results)
    for outcome, count in outcomes.items():
        print(f"{count:5}  {outcome}")
    for finding in findings:
        print(f"{'kept  ' if finding.kept else 'BROKEN'}  {finding.promise}: {finding.detail}")
    wall_s = round(time.monotonic() - started_s)
    promises = {finding.promise: f"{'kept' if finding.kept else 'BROKEN'}: {finding.detail}" for finding in findings}
    record(
        "chaos", {"trials": trials, "kills": kills, "seed": seed, "wall_s": wall_s, "outcomes": outcomes, **promises}
    )
    return 0 if code == 0 and all(finding.kept for finding in findings) else 1


def chaos_spec(trials: int, seed: int) -> dict[str, Any]:
    """The sweep's YAML as a document: faults are a dimension, and each makes its own launch."""
    return {
        "sweep": "chaos",
        "description": "The stub server with a random fault in every trial; nothing is measured",
        "engine": {
            "kind": "sglang",
            "launcher": [sys.executable, "-I", "-S", str(STUB)],
            "model_path": "stub",
            "args": {"tp-size": NUM_GPUS},
            "switch_in_place": False,
            "deadlines_s": {
                "load": 20,
                "nccl_init": 2,
                "capture": 20,
                "draft_init": 2,
                "first_request": 3,
                "block": 5,
                "stop": 40,
            },
        },
        "search": {
            "num_steps": [1, 2, 3, 4, 5],
            "nccl": ["default", "ll"],
            "env": {"STUB_FAULT": list(FAULTS)},
        },
        "nccl_sets": {"ll": {"NCCL_PROTO": "LL"}},
        "drafters": {"any": "any"},
        "workload": {
            "prompt_tokens": 8,
            "output_tokens": 40,
            "blocks": 2,
            "requests_per_block": 3,
            "warmup_blocks": 1,
        },
        "study": {"sampler": {"name": "random"}, "seed": seed, "max_replicates": 3},
        "control": {"every": 0, "incumbent": False},
        "budget": {"trials": trials},
        "resources": {"gpus": NUM_GPUS},
    }


@dataclass(frozen=True, slots=True)
class _Sweep:
    """How its driver is started."""

    spec: Path
    results: ResultsFolder
    folder: Path
    address: str

    def start(self, *, resume: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray_jobs.run_sweep", str(self.spec), "--results", str(self.results.root)]
        with (self.folder / "driver.log").open("ab") as log:
            return subprocess.Popen(
                command + (["--resume"] if resume else []),
                cwd=ROOT,
                env={**_environment(self.folder), "RAY_ADDRESS": self.address},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _run_until(sweep: _Sweep, *, num_trials: int, resume: bool, guard_too: bool) -> str:
    """Run the sweep and kill its driver (and before it a guard) once so many trials have rows."""
    driver = sweep.start(resume=resume)
    while driver.poll() is None and _num_trials(sweep.results) < num_trials:
        time.sleep(_POLL_S)
    if driver.poll() is not None:
        return f"ended by itself with {driver.returncode}"
    guard = _kill_a_guard(sweep.folder) if guard_too else None
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    return "killed" + (f", and guard {guard} before it" if guard else "")


def _kill_a_guard(folder: Path) -> int | None:
    """Kill one guard of this benchmark's servers, so that the next start has something to reap."""
    for path in _leases(folder):
        try:
            held = lease.Lease.read(path)
        except FileNotFoundError:  # its server has just been stopped
            continue
        lease.send({held.guard}, signal.SIGKILL)
        return held.guard.pid
    return None


@contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    """A Ray node of this benchmark's own, whose servers keep their leases in `folder`. Outlives the drivers."""
    (folder / "tmp").mkdir(exist_ok=True)
    port = free_port()
    words = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=3",
        f"--num-gpus={NUM_GPUS}", f"--port={port}", "--node-ip-address=127.0.0.1",
        "--include-dashboard=false", "--object-store-memory=100000000",
    ]  # fmt: skip
    with (folder / "head.log").open("wb") as log, tempfile.TemporaryDirectory(prefix="chaos") as short_folder:
        words.append(f"--temp-dir={short_folder}")  # Ray's sockets do not fit below long paths
        head = subprocess.Popen(words, env=_environment(folder), stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_for_port(port, head)
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait(timeout=60)


def _environment(folder: Path) -> dict[str, str]:
    """Of the Ray node and the drivers: their servers keep leases below `folder`, away from others of this machine."""
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**os.environ, **settings, "TMPDIR": str(folder / "tmp")}


def _wait_for_port(port: int, head: subprocess.Popen[bytes], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and head.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the Ray head did not listen on port {port} within {timeout_s:.0f} s")


def _num_trials(results: ResultsFolder) -> int:
    folder = results.root / "tables" / "trials"
    return len({path.stem.rpartition("-a")[0] for path in folder.glob("*.parquet")})


def check_rows(results: ResultsFolder, trials: int) -> Iterator[Finding]:
    """Every trial has one row per attempt, and the last attempt's status is final."""
    parts = read_parts(results, "trials", columns=["status", "role"])
    rows = parts.rows.to_pylist()
    odd_parts = [str(damage) for damage in parts.damaged]
    yield Finding(
        promise="one row per attempt", kept=not odd_parts, detail=f"{len(rows)} rows, doubled or damaged: {odd_parts}"
    )
    last = {row["trial_id"]: row for row in sorted(rows, key=lambda row: row["attempt"])}
    odd = sorted(row["trial_id"] for row in last.values() if row["status"] not in FINAL_STATUSES)
    candidates = [row for row in last.values() if row["role"] == "candidate"]
    yield Finding(promise="every last attempt is final", kept=not odd, detail=f"{len(last)} trials, not final: {odd}")
    yield Finding(
        promise="all trials ran", kept=len(last) >= trials, detail=f"{len(candidates)} candidates, {len(last)} in all"
    )
    journals = sorted(path.name for path in (results.root / "journal").glob("*"))
    yield Finding(promise="no journal is left", kept=not journals, detail=str(journals or "none"))


FINAL_STATUSES = frozenset({"completed", "pruned", "failed", "invalid"})


def check_leftovers(folder: Path) -> Iterator[Finding]:
    """No lease, server's folder, marked process or listening port; given a moment after the driver's end."""
    deadline = time.monotonic() + _SETTLE_S
    while (_leases(folder) or _marked(folder)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    leases, marked = _leases(folder), _marked(folder)
    yield Finding(promise="no lease is left", kept=not leases, detail=str([path.name for path in leases] or "none"))
    scratch = sorted(path.name for path in (folder / "tmp").glob("specsweep-*/server-*"))
    yield Finding(promise="no server's folder is left", kept=not scratch, detail=str(scratch or "none"))
    yield Finding(promise="no process is left", kept=not marked, detail=str(marked or "none"))
    daemons = _daemon_ports(folder)
    open_ports = sorted(daemons & listening_ports())
    yield Finding(
        promise="no port is left",
        kept=not open_ports,
        detail=f"{len(daemons)} daemons held one, now: {open_ports or 'none'}",
    )


def _leases(folder: Path) -> list[Path]:
    return sorted((folder / "tmp").glob("specsweep-*/leases/*.json"))


def _marked(folder: Path) -> list[int]:
    """Live processes that bear the mark of a lease, and inherited this benchmark's folder."""
    mark, own = f"{lease.MARK}=".encode(), f"TMPDIR={folder / 'tmp'}".encode()
    found = []
    for identity in lease.process_table():
        try:
            environment = Path(f"/proc/{identity.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if own in environment and any(entry.startswith(mark) for entry in environment):
            found.append(identity.pid)
    return sorted(found)


def _daemon_ports(folder: Path) -> set[int]:
    """What the stubs' daemons said they listen on."""
    words = (
        line.partition("daemon ")[2].split()
        for path in (folder / "results").rglob("*.log")
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if " daemon " in line
    )
    return {int(parts[1]) for parts in words if len(parts) == 2}


def listening_ports() -> set[int]:
    """TCP ports of this machine in state LISTEN (0A)."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:])
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


@contextmanager
def _bystanders(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes with the stub's program and words in their command line that note every signal they get."""
    words = [str(STUB), sys.executable, "-m", "sglang.launch_server", "--model-path", "stub", "--port", "30000"]
    started = []
    for number in range(2):
        with (folder / f"bystander-{number}.txt").open("w") as notes:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _BYSTANDER, *words],
                    stdout=notes,
                    cwd=folder if number else None,
                    start_new_session=True,
                    text=True,
                )
            )
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def _check_bystanders(folder: Path, bystanders: Sequence[subprocess.Popen[str]]) -> Iterator[Finding]:
    dead = [process.pid for process in bystanders if process.poll() is not None]
    notes = [path.read_text(encoding="utf-8").split() for path in sorted(folder.glob("bystander-*.txt"))]
    signalled = [words[1:] for words in notes if words != ["up"]]
    yield Finding(
        promise="nothing else was signalled",
        kept=not dead and not signalled,
        detail=f"{len(notes)} bystanders, dead: {dead or 'none'}, signals: {signalled or 'none'}",
    )


def _outcomes(results: ResultsFolder) -> dict[str, int]:
    """Rows by fault and how the attempt ended."""
    rows = read_table(results, "trials").select(["requested", "status", "stage", "kind"]).to_pylist()
    words = (
        (dict(row["requested"]).get("env.STUB_FAULT", "-"), row["status"], row["stage"] or "", row["kind"] or "")
        for row in rows
    )
    return {" ".join(filter(None, outcome)): count for outcome, count in sorted(Counter(words).items())}


if __name__ == "__main__":
    sys.exit(main())
