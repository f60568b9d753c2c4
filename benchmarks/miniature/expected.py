"""What training expects a server to accept: `python -m benchmarks.miniature.expected MODELS SPEC`.

Continues the spec's prompts greedily, unrolls the drafter over that text as in training, and walks through it as a
server does: draft, keep what is right, add the target's own token. Prints tokens per cycle and how many cycles had
them, as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import torch

from benchmarks.miniature.drafter import Drafter
from benchmarks.miniature.export import read_weights
from benchmarks.miniature.shapes import RECIPES
from benchmarks.miniature.target import Target, continue_greedily, make_target
from sweeps.spec.reading import read_spec
from sweeps.spec.workload import plan_blocks

_MAPS = {"d2t", "t2d"}


def accepted(drafter: Drafter, target: Target, prompt: torch.Tensor, *, output_tokens: int, steps: int) -> list[int]:
    """Tokens of each cycle, bonus token included, until `output_tokens` are reached; the first comes with the prompt.

    Args:
        prompt: token ids, (length,).
    """
    length = prompt.numel()
    text = continue_greedily(target, prompt[None], output_tokens + steps + 2)
    with torch.no_grad():
        _, taps = target(text)
        embedded = target.model["embed_tokens"](text[:, 1:])
        drafts = [logits.argmax(dim=-1) for logits in drafter(embedded, taps[:, :-1], steps=steps)]
    right = [(drafter.kept[each][0, :-1] == text[0, 2:]).tolist() for each in drafts]
    entry, produced, cycles = length - 1, 1, []
    while produced < output_tokens:
        kept = 0
        while kept < steps and right[kept][entry + kept]:
            kept += 1
        cycles.append(kept + 1)
        entry, produced = entry + kept + 1, produced + kept + 1
    return cycles


def read_pair(folder: Path, recipe: str) -> tuple[Target, Drafter]:
    """Target and drafter of a recipe, in float32, from the folders `target` and `drafter`."""
    shapes, weights = RECIPES[recipe], read_weights(folder / "drafter")
    target = make_target(shapes.target)
    target.load_state_dict({name: each.float() for name, each in read_weights(folder / "target").items()})
    drafter = Drafter(shapes.target.hidden, shapes.drafter, weights["t2d"].nonzero().flatten())
    drafter.load_state_dict({name: each.float() for name, each in weights.items() if name not in _MAPS})
    return target.eval(), drafter.eval()


def main() -> None:
    """Walk through every block of the spec with its longest chain."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.miniature.expected", description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("spec", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = read_spec(options.spec)
    target, drafter = read_pair(options.models, "tiny")
    cycles: Counter[int] = Counter()
    for block in plan_blocks(spec.workload, folder=options.spec.parent):
        for prompt in block.prompts:
            cycles.update(
                accepted(
                    drafter,
                    target,
                    torch.tensor(prompt.token_ids),
                    output_tokens=spec.workload.output_tokens,
                    steps=max(spec.search.num_steps),
                )
            )
    print(json.dumps(cycles))


if __name__ == "__main__":
    main()
