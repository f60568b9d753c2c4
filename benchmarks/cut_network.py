"""A sweep over raylets in network namespaces, one cut off and one killed: `sudo python -m benchmarks.cut_network`.

Needs Linux, root and iproute2. A bridge joins the head (in the root namespace, without GPUs) with the nodes, each in a
namespace of its own with 8 logical GPUs. After some trials the link of one node is taken down, after some more the
raylet of another is killed with its workers. The sweep must end with every configuration measured. Everything that was
made is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.load import Ends, load_spec, run
from benchmarks.record import record
from benchmarks.sleeping import open_sleeping
from ray_jobs.ray_settings import settle_environment
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.search.study import SweepStudy

NET = "10.213.77"
"""Private addresses (RFC 1918) that this machine is not expected to use."""
BRIDGE = "specsweep0"
PORT = 6397


def ip(*words: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *words], check=True)


@contextmanager
def bridge() -> Iterator[None]:
    """The head's end of the network."""
    ip("link", "add", BRIDGE, "type", "bridge")
    try:
        ip("addr", "add", f"{NET}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        yield
    finally:
        ip("link", "del", BRIDGE)


@contextmanager
def namespace(number: int) -> Iterator[str]:
    """A namespace on the bridge. Yields its name."""
    name, link = f"specsweep-{number}", f"ss{number}"
    ip("netns", "add", name)
    ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    try:
        ip("link", "set", link, "master", BRIDGE, "up")
        for words in (
            ("addr", "add", f"{NET}.{number + 1}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", name, *words)
        yield name
    finally:
        ip("link", "del", link)
        ip("netns", "del", name)


@contextmanager
def raylet(words: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`ray start --block` in a session of its own; killed at the end."""
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    command = [*words, "--block", "--disable-usage-stats", "--object-store-memory=100000000"]
    with (folder / f"start-{time.monotonic_ns()}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a raylet and all that it started in its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Faults(Ends):
    """Cuts and kills while the sweep runs, and notes when."""

    def __init__(self, victim: subprocess.Popen[bytes], *, cut_after: int, kill_after: int) -> None:
        super().__init__()
        self._victim, self._cut_after, self._kill_after = victim, cut_after, kill_after
        self.at_s: dict[str, float] = {}

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        super().ended(trial, outcome)
        number = len(self.ended_s)
        if number >= self._cut_after and "cut" not in self.at_s:
            self.at_s["cut"] = time.monotonic()
            ip("link", "set", "ss1", "down")
        if number >= self._kill_after and "killed" not in self.at_s:
            self.at_s["killed"] = time.monotonic()
            end(self._victim)
        if outcome.kind == "interrupted":
            self.at_s[f"lost_{trial.trial_id}"] = time.monotonic()


def main() -> None:
    """Run the sweep, print what happened, record it. Exits with 1 if a configuration was not measured."""
    parser = argparse.ArgumentParser(description="A sweep over network namespaces; needs root.")
    parser.add_argument("--trials", type=int, default=60)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("error: wanted root, for `ip netns add`")
    settle_environment()
    os.environ.update(RAY_AUTH_MODE="disabled")
    os.environ.pop("RAY_AUTH_TOKEN", None)
    with tempfile.TemporaryDirectory(prefix="ns") as short, tempfile.TemporaryDirectory() as root, bridge():
        figures = sweep_with_faults(Path(short), Path(root), arguments.trials)
    print(json.dumps(figures, indent=2))
    print(record("cut_network", figures))
    sys.exit(0 if figures["configurations_measured"] == figures["configurations"] else 1)


def sweep_with_faults(folder: Path, root: Path, num_trials: int) -> dict[str, object]:
    """Three nodes; the first is cut off, the second killed, the third goes on."""
    import ray

    start = [str(Path(sys.executable).with_name("ray")), "start"]
    head = [*start, "--head", f"--port={PORT}", f"--node-ip-address={NET}.1", "--num-cpus=1", "--num-gpus=0"]
    head += ["--include-dashboard=false", f"--temp-dir={folder}"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(raylet(head, folder))
        wait_for(lambda: answers(f"{NET}.1", PORT), "the head")
        ray.init(address=f"{NET}.1:{PORT}", _node_ip_address=f"{NET}.1", log_to_driver=False)
        stack.callback(ray.shutdown)
        nodes: list[subprocess.Popen[bytes]] = []
        for number in (1, 2, 3):
            name = stack.enter_context(namespace(number))
            words = ["ip", "netns", "exec", name, *start, f"--address={NET}.1:{PORT}"]
            words += [f"--node-ip-address={NET}.{number + 1}", f"--node-name={name}", "--num-cpus=1", "--num-gpus=8"]
            nodes.append(stack.enter_context(raylet(words, folder)))
            # One after the other: raylets that start together in one session folder may wait for each other for ever.
            wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 1 + len(nodes), name)
        began_s = time.monotonic()
        faults = Faults(nodes[1], cut_after=num_trials // 4, kill_after=num_trials // 2)
        study = run(load_spec(num_trials), root, open_sleeping, faults)
        faults.at_s["end"] = time.monotonic()
    return told(study, root, faults, began_s)


def told(study: SweepStudy, root: Path, faults: Faults, began_s: float) -> dict[str, object]:
    """The figures of a run."""
    folder = ResultsFolder(root)
    rows = read_table(folder, "trials").to_pylist()
    events = read_table(folder, "events").to_pylist()
    done = [row for row in rows if row["status"] == "completed"]
    wanted = study.observations.measured()
    return {
        "seconds": {name: at_s - began_s for name, at_s in faults.at_s.items()},
        "trials_completed": len(done),
        "trials_interrupted": sum(row["kind"] == "interrupted" for row in rows),
        "trials_by_node": dict(Counter(row["node"] for row in done)),
        "nodes_lost": [row["detail"] for row in events if row["event"] == "node_lost"],
        "configurations": len(wanted),
        "configurations_measured": len({row["configuration_id"] for row in done}),
        "stop_reason": study.stop_reason,
    }


def wait_for(holds: Callable[[], bool], what: str) -> None:
    """Until something of Ray is up; Ray itself gives that 30 s."""
    end_s = time.monotonic() + 60.0
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} did not start within 60 s")
        time.sleep(0.2)


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


if __name__ == "__main__":
    main()
