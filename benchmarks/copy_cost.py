"""What a copy at a URL costs the trials: `python -m benchmarks.copy_cost`. Needs tests/requirements.txt (moto).

Sweeps of simulated trials on one node, by turns with a plain folder and with a copy on an S3 server of this machine.
The server runs on the same cores, and a trial is 4 blocks without sleep, so this is far worse than a real sweep, whose
trials take minutes. Figures are of the driver: wall seconds between ends of trials, CPU, and the wait at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.load import Ends, cluster_of, load_spec, run
from benchmarks.record import record
from benchmarks.sleeping import open_simulated
from ray_jobs.ray_settings import settle_environment
from ray_jobs.results import OpenedResults
from ray_jobs.stored_results import stored_results
from sweeps.results.tables import ResultsFolder

NUM_TRIALS, TURNS, PORT = 100, 3, 5397


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """moto's server in a process of its own. Yields the URL of a bucket's folder, without the last part."""
    import pyarrow.fs

    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test")
    command = [sys.executable, "-c", f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{PORT}'])"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            files = pyarrow.fs.S3FileSystem(
                endpoint_override=f"127.0.0.1:{PORT}", scheme="http", region="us-east-1", allow_bucket_creation=True
            )
            for _ in range(20):
                with contextlib.suppress(OSError):
                    files.create_dir("copies")
                    break
            yield "s3://copies/"
        finally:
            server.terminate()


def sweep(root: Path, url: str | None) -> Mapping[str, float]:
    """One sweep of `NUM_TRIALS`."""
    ends, spec = Ends(), load_spec(NUM_TRIALS)
    cpu_s = time.process_time()
    if url is None:
        root.mkdir()
        run(spec, root, open_simulated, ends)
        end_s = 0.0
    else:
        end_s = _copied(root, url, ends)
    times = sorted((*ends.ended_s, *ends.control_s))
    return {
        "per_trial_median_ms": 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times)),
        "driver_cpu_per_trial_ms": 1e3 * (time.process_time() - cpu_s) / len(times),
        "wait_at_the_end_s": end_s,
    }


def _copied(root: Path, url: str, ends: Ends) -> float:
    from ray_jobs.copying_observer import CopyingObserver

    with stored_results(url, root) as stored:
        folder = ResultsFolder(stored.root)
        folder.manifest.write_text(json.dumps({"sweep_id": "load", "engine": "simulated"}))
        opened = OpenedResults(folder=folder, sweep_id="load", resumed=False, lock=-1)
        stored.begin()
        run(load_spec(NUM_TRIALS), stored.root, open_simulated, CopyingObserver(ends, stored.copier, opened))
        began_s = time.monotonic()
    assert stored.code == 0, "the copy is not whole"
    return time.monotonic() - began_s


def main() -> None:
    """Measure, print, record."""
    settle_environment()
    os.environ.update(RAY_AUTH_MODE="disabled")
    os.environ.pop("RAY_AUTH_TOKEN", None)
    seen: dict[str, list[Mapping[str, float]]] = {"plain": [], "copied": []}
    query = f"?endpoint_override=127.0.0.1:{PORT}&scheme=http&region=us-east-1"
    with s3_server() as base, cluster_of(1), tempfile.TemporaryDirectory() as root:
        for turn in range(TURNS):
            seen["plain"].append(sweep(Path(root) / f"plain-{turn}", None))
            seen["copied"].append(sweep(Path(root) / f"copied-{turn}", f"{base}{turn}{query}"))
    figures: dict[str, object] = {
        name: {what: statistics.median(each[what] for each in turns) for what in turns[0]}
        for name, turns in seen.items()
    }
    print(json.dumps(figures, indent=2))
    print(record("copy_cost", figures))


if __name__ == "__main__":
    main()
