"""The `gp` sampler needs torch, which the light part leaves out: here with the torch of the server's environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITES = sorted((ROOT / ".venv-engine" / "lib").glob("python*/site-packages"))
SWEEP = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])  # after this environment's own packages: only what is missing comes from there
from sweeps.spec.space import Space
from sweeps.search.study import SweepStudy
from sweeps.measure.held_engine import HeldEngine
from tests.sweeps.stub_engine import StubEngine, drive, stub_context, stub_spec

spec = stub_spec("study: {sampler: {name: gp, options: {n_startup_trials: 2}}, pruner: {name: median}}\\n")
study = SweepStudy(spec, Space(spec))
trials = drive(study, HeldEngine(StubEngine()), stub_context(spec, Path(sys.argv[2])))
candidates = [trial.configuration for trial in trials if trial.role == "candidate"]
assert len(candidates) == len(set(candidates)) > 4
print(study.incumbent.num_steps, study.incumbent.eagle_topk)
"""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not SITES, reason="no .venv-engine: `make engine` builds it"),
]


def test_gp_finds_the_best_of_the_stubs_landscape(tmp_path: Path) -> None:
    words = [sys.executable, "-W", "ignore", "-c", SWEEP, str(SITES[0]), str(tmp_path)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["2", "1"]
