"""How often the analysis is right: simulated sweeps of known truth, judged by the package's own functions."""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, record
from benchmarks.record import figures_of as figures_recorded
from benchmarks.verdict_scenes.claims import judge
from benchmarks.verdict_scenes.frames import results_of
from benchmarks.verdict_scenes.oracle import finds
from benchmarks.verdict_scenes.page import kept
from benchmarks.verdict_scenes.scenes import SCENES, Scene
from benchmarks.verdict_scenes.score import Figure, figures_of, summarise
from benchmarks.verdict_scenes.sweep import simulate

_CHUNK = 20
"""Sweeps that one process takes at a time."""
_PHASES_EVERY = 4
"""One sweep in so many has its phases timed, because each phase costs the analysis as much as the throughput does. In
all of them if a set acts on the draft phase."""


def measure(scene: Scene, num_sweeps: int, *, pool: ProcessPoolExecutor | None = None) -> dict[str, Figure]:
    """Figures of a scene. The seeds of its sweeps depend on its name and their number alone."""
    jobs = [(scene, range(start, min(start + _CHUNK, num_sweeps))) for start in range(0, num_sweeps, _CHUNK)]
    found = map(run, jobs) if pool is None else pool.map(run, jobs)
    return summarise([sweep for chunk in found for sweep in chunk])


def run(job: tuple[Scene, range]) -> list[dict[str, float]]:
    """Figures of some sweeps of a scene."""
    scene, numbers = job
    name = zlib.crc32(scene.name.encode())
    acts_on_drafts = any(gain.phase == "draft" for gain in scene.truth.gains)
    sweeps = [
        simulate(
            scene.truth,
            scene.noise,
            scene.plan,
            np.random.default_rng([name, number]),
            crowded=scene.crowded,
            is_timed=acts_on_drafts or number % _PHASES_EVERY == 0,
        )
        for number in numbers
    ]
    return [
        figures_of(sweep, judge(results)) | finds(sweep, scene.noise)
        for sweep, results in zip(sweeps, results_of(sweeps), strict=True)
    ]


def main() -> None:
    """Run scenes and print what they reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", nargs="*", default=[""], metavar="PART", help="only scenes with such a name")
    parser.add_argument("--sweeps", type=int, default=1000, help="of each scene")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="keep the figures; other scenes keep theirs")
    asked = parser.parse_args()
    scenes = [scene for scene in SCENES if any(part in scene.name for part in asked.scenes)]
    with ProcessPoolExecutor(asked.processes) as pool:
        for scene in scenes:
            began = time.perf_counter()
            figures = measure(scene, asked.sweeps, pool=pool)
            seconds = time.perf_counter() - began
            print(f"{scene.name} ({seconds:.0f} s)", flush=True)
            for line in lines(scene, figures):
                print(f"    {line}", flush=True)
            if asked.record:
                keep(scene, {"sweeps": asked.sweeps, "core_s": asked.processes * seconds, **kept(scene, figures)})


def keep(scene: Scene, found: Mapping[str, Any]) -> None:
    """Record a scene beside all others that still exist, in their order."""
    path = RESULTS / "verdicts.json"
    before: Any = figures_recorded("verdicts")["scenes"] if path.is_file() else {}
    after = {**before, scene.name: found}
    record("verdicts", {"scenes": {each.name: after[each.name] for each in SCENES if each.name in after}})


def lines(scene: Scene, figures: Mapping[str, Figure]) -> Iterator[str]:
    """For people: goal, figure with two standard errors, met or missed."""
    for name, figure in sorted(figures.items()):
        goal = scene.goal(name)
        scale, unit = (1, "% wide") if name.endswith("width") else (100, "%")
        shown = f"{name:34} {scale * figure.value:7.2f} +- {scale * 2 * figure.error:.2f} {unit}"
        yield shown if goal is None else f"{shown}, wanted {goal}: {goal.said(figure.value, figure.error)}"


if __name__ == "__main__":
    main()
