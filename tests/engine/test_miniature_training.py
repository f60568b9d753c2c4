"""The miniatures' own models: what a server loads is what was trained, and a stopped run goes on where it was."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ROOT

pytestmark = pytest.mark.engine

KIMI = """KimiShape(
    hidden=64, layers=4, heads=4, q_rank=32, kv_rank=32, nope=16, rope=8, value=16, intermediate=128, expert=32,
    experts=8, experts_per_token=2, taps=(0, 1, 2))"""
AGAINST_TRANSFORMERS = f"""
import json, sys
from pathlib import Path
import torch, transformers
from benchmarks.miniature.export import write_model
from benchmarks.miniature.shapes import RECIPES, KimiShape
from benchmarks.miniature.target import make_target

torch.set_num_threads(1)
found = {{}}
for name, shape in (("llama", RECIPES["tiny"].target), ("kimi", {KIMI})):
    torch.manual_seed(0)
    target = make_target(shape).eval()
    with torch.no_grad():
        for weight in target.parameters():
            weight.copy_((weight * 4 if weight.dim() > 1 else weight).bfloat16())
        for layer in target.model["layers"][1:] if name == "kimi" else ():
            layer.mlp.gate.e_score_correction_bias.normal_(std=0.05)
        write_model(Path(sys.argv[1]) / name, target.config(), target.hugging_face())
        reference = transformers.AutoModelForCausalLM.from_pretrained(Path(sys.argv[1]) / name, dtype=torch.float32)
        tokens = torch.randint(0, 256, (2, 40))
        logits, taps = target(tokens)
        theirs = reference(tokens, output_hidden_states=True)
        first = theirs.hidden_states[shape.taps[0] + 1]
        found[name] = {{
            "class": type(reference).__name__,
            "logits": float((logits - theirs.logits).abs().max()),
            "tap": float((taps[..., : shape.hidden] - first).abs().max()),
            "scale": float(logits.abs().max()),
        }}
print(json.dumps(found))
"""
TRAINING = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from benchmarks.miniature import training
from benchmarks.miniature.corpus import read_corpus
from benchmarks.miniature.shapes import RECIPES, Stage
from benchmarks.miniature.target import make_target, next_token_loss

torch.set_num_threads(1)
corpus = read_corpus(torch.device("cpu"), Path("sweeps"))
stage = Stage(steps=6, batch=2, context=32, learning_rate=1e-3)


class StoppedError(Exception):
    pass


def train(checkpoint, stop_after):
    torch.manual_seed(0)
    target = make_target(replace(RECIPES["tiny"].target, layers=3))
    loss_of = next_token_loss(target, corpus, stage, seed=0)

    def stop(progress):
        if progress.step == stop_after:
            raise StoppedError

    try:
        training.run("t", target, stage, loss_of, checkpoint=checkpoint, checkpoint_every_s=0.0, after_step=stop)
    except StoppedError:
        return None
    return torch.cat([weight.flatten() for weight in target.parameters()])


whole = train(None, None)
checkpoint = Path(sys.argv[1]) / "checkpoint"
assert train(checkpoint, 4) is None and checkpoint.is_file()
resumed = train(checkpoint, None)
print(float((whole - resumed).abs().max()), float(whole.std()))
"""


def run(document: Mapping[str, Any], program: str, folder: Path) -> str:
    words = [document["engine"]["python"], "-c", program, str(folder)]
    path = ":".join([str(ROOT), str(ROOT / "tests" / "sglang_cpu" / "shim")])
    done = subprocess.run(words, cwd=ROOT, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_what_is_written_is_what_transformers_reads(document: Mapping[str, Any], tmp_path: Path) -> None:
    found = json.loads(run(document, AGAINST_TRANSFORMERS, tmp_path))

    assert [each["class"] for each in found.values()] == ["LlamaForCausalLM", "DeepseekV3ForCausalLM"]
    for each in found.values():
        assert each["scale"] > 1
        assert each["logits"] < 1e-3
        assert each["tap"] < 1e-3


def test_a_stopped_run_goes_on_where_it_was(document: Mapping[str, Any], tmp_path: Path) -> None:
    difference, scale = map(float, run(document, TRAINING, tmp_path).split())

    assert difference < 1e-5 * scale
