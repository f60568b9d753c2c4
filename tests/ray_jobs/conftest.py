"""A real Ray head for tests that submit jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_jobs.waiting import free_port, listens, wait_until


@pytest.fixture
def head(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A local head with 8 logical GPUs and its own ports, ended by its process: `ray stop` would stop others too."""
    gcs, dashboard, agent, client = (free_port() for _ in range(4))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # a job's `python` is the first on the head's PATH
    environment = {**os.environ, "PATH": path, "RAY_AUTH_MODE": "disabled", "RAY_JOB_STOP_WAIT_TIME_S": "30"}
    ray = Path(sys.executable).with_name("ray")
    words = [
        str(ray), "start", "--head", "--block", "--num-cpus=4", "--num-gpus=8",
        f"--port={gcs}", "--node-ip-address=127.0.0.1", "--disable-usage-stats", f"--ray-client-server-port={client}",
        f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}", "--object-store-memory=100000000",
    ]  # fmt: skip
    with (tmp_path / "head.log").open("wb") as log, tempfile.TemporaryDirectory(prefix="head") as short_folder:
        words.append(f"--temp-dir={short_folder}")  # Ray's sockets do not fit below pytest's long paths
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until(lambda: listens(dashboard) and listens(agent), process)
            yield f"http://127.0.0.1:{dashboard}", environment
        finally:
            process.terminate()
            process.wait(timeout=60)
