"""Train a miniature: `python -m benchmarks.miniature OUT --recipe tiny --seed 0`.

Writes OUT/target and OUT/drafter (Hugging Face folders), with the recipe `large` OUT/drafter_poor too, and
OUT/summary.json. A run that was stopped goes on where it was: started again with the same words, it skips finished
models and resumes the unfinished one from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.miniature.corpus import Corpus, read_corpus
from benchmarks.miniature.drafter import Drafter
from benchmarks.miniature.drafting import acceptance_by_position, drafting_loss, own_text
from benchmarks.miniature.export import write_model
from benchmarks.miniature.shapes import RECIPES, Recipe, Stage
from benchmarks.miniature.target import Target, held_out_loss, make_target, next_token_loss
from benchmarks.miniature.training import Progress, cast_weights, run


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to train, where, and for how long at most."""

    recipe: Recipe
    seed: int
    out: Path
    device: torch.device
    dtype: torch.dtype
    limit_s: float | None
    """Of both runs together; two thirds are the target's."""

    @property
    def checkpoints(self) -> bool:
        """Whether unfinished runs are kept. A large one is minutes long, and its optimizer tens of gigabytes."""
        return self.device.type == "cpu"

    def note(self, **facts: Any) -> None:
        """Add facts to the summary and print them."""
        path = self.out / "summary.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.write_text(json.dumps(known | facts, indent=2) + "\n", encoding="utf-8")
        for name, value in facts.items():
            print(f"{name}: {value}", flush=True)


def train(job: Job) -> None:
    """Train what is not there yet."""
    corpus = read_corpus(job.device)
    job.note(
        recipe=asdict(job.recipe),
        seed=job.seed,
        versions={"python": platform.python_version(), "torch": torch.__version__},
        bytes={"training": corpus.training.numel(), "held_out": corpus.held_out.numel()},
    )
    torch.manual_seed(job.seed)
    target = cast_weights(make_target(job.recipe.target).to(job.device), job.dtype)
    _train_target(job, target, corpus)
    kept = corpus.most_frequent(job.recipe.drafter.vocabulary).to(job.device)
    torch.manual_seed(job.seed + 1)
    drafter = cast_weights(Drafter(job.recipe.target.hidden, job.recipe.drafter, kept).to(job.device), job.dtype)
    if not (job.out / "drafter").is_dir():
        _train_drafter(job, drafter, target, corpus)


def _train_target(job: Job, target: Target, corpus: Corpus) -> None:
    folder, kept = job.out / "target", job.out / "target.pt"
    if kept.is_file():
        target.load_state_dict(torch.load(kept, map_location=job.device, weights_only=True))
        return
    stage = job.recipe.target_stage
    target.train()
    began, checkpoint = time.monotonic(), job.out / "target.checkpoint"
    done = run(
        "target",
        target,
        stage,
        next_token_loss(target, corpus, stage, seed=job.seed),
        limit_s=None if job.limit_s is None else job.limit_s * 2 / 3,
        checkpoint=checkpoint if job.checkpoints else None,
    )
    told = _told(stage, done, time.monotonic() - began)
    job.note(
        target=told
        | {
            "weights": sum(weight.numel() for weight in target.parameters()),
            "weights_per_token": target.weights_per_token(),
            "flop_per_s": 6 * target.weights_per_token() * told["tokens"] / told["seconds"],
            "held_out_nats_per_byte": held_out_loss(target, corpus, stage.context),
        }
    )
    if not folder.is_dir():
        write_model(folder, target.config(), target.hugging_face())
    torch.save(target.state_dict(), kept)
    checkpoint.unlink(missing_ok=True)


def _train_drafter(job: Job, drafter: Drafter, target: Target, corpus: Corpus) -> None:
    recipe, stage = job.recipe, job.recipe.drafter_stage
    poor = job.out / "drafter_poor"

    def write(folder: Path, progress: Progress, seconds: float) -> None:
        shares = acceptance_by_position(drafter, target, text, draft_steps=recipe.draft_steps)
        told = {"accepted_by_position": shares, "accept_length": 1 + sum(shares)}
        job.note(**{folder.name: _told(stage, progress, seconds) | told})
        write_model(folder, drafter.config(recipe.target.taps), drafter.hugging_face())

    def after_step(progress: Progress) -> None:
        if recipe.poor_share is not None and progress.share >= recipe.poor_share and not poor.is_dir():
            write(poor, progress, time.monotonic() - began)

    target.requires_grad_(requires_grad=False)
    text = own_text(target, corpus)
    began, checkpoint = time.monotonic(), job.out / "drafter.checkpoint"
    done = run(
        "drafter",
        drafter,
        stage,
        drafting_loss(drafter, target, corpus, stage, draft_steps=recipe.draft_steps, seed=job.seed + 1),
        limit_s=None if job.limit_s is None else job.limit_s / 3,
        checkpoint=checkpoint if job.checkpoints else None,
        after_step=after_step,
    )
    write(job.out / "drafter", done, time.monotonic() - began)
    checkpoint.unlink(missing_ok=True)


def _told(stage: Stage, progress: Progress, seconds: float) -> dict[str, Any]:
    """`flop_per_s` beside it counts two operations a weight forward and four backward, attention left out."""
    tokens = progress.step * stage.batch * stage.context
    return {"steps": progress.step, "tokens": tokens, "seconds": round(seconds, 1), "training_loss": progress.loss}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train one miniature; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.miniature", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the models and of what a resumed run needs")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="end after this time, whatever was reached")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    train(
        Job(
            recipe=RECIPES[options.recipe],
            seed=options.seed,
            out=options.out,
            device=device,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            limit_s=None if options.minutes is None else options.minutes * 60,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
