"""The trained miniature on the real server: accept lengths that steps, trees, temperature and the drafter explain."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import yaml

from sweeps.engines.base import BlockRecord
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import plan_blocks
from tests.engine.conftest import ROOT, Bench

pytestmark = pytest.mark.engine

SPEC = ROOT / "sweeps" / "specs" / "miniature_cpu.yaml"
MODELS = ROOT / "tests" / "sglang_cpu" / "miniature"
STEPS = (1, 2, 3, 4, 5)
TREES = ((3, 4), (3, 6), (5, 6))
"""Steps and draft tokens at top-k 2; chains of 3 and 5 steps verify 4 and 6 tokens."""
SHUFFLE = """
import sys, torch
from safetensors.torch import load_file, save_file
weights = load_file(sys.argv[1])
order = torch.randperm(weights["fc.weight"].shape[1], generator=torch.Generator().manual_seed(0))
weights["fc.weight"] = weights["fc.weight"][:, order].contiguous()
save_file(weights, sys.argv[1], metadata={"format": "pt"})
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """The blocks of one configuration."""

    blocks: tuple[BlockRecord, ...]

    @property
    def texts(self) -> list[str]:
        return [request.output_hash for block in self.blocks for request in block.requests]

    @property
    def tokens(self) -> list[int]:
        """Of every cycle, bonus token included."""
        return [int(tokens) for block in self.blocks for tokens in block.cycles["tokens"].to_pylist()]

    @property
    def accept_length(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    @property
    def error(self) -> float:
        return standard_error(self.tokens)

    def as_if_shorter(self, num_steps: int) -> list[int]:
        """Tokens of the same cycles if drafting had ended after so many steps."""
        return [min(tokens, num_steps + 1) for tokens in self.tokens]


def standard_error(values: Sequence[int]) -> float:
    """Of the mean, values taken as independent."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values)) / len(values)


class Miniature:
    """Serves the trained pair: one server for each call, stopped before a test looks at what it left."""

    def __init__(self, bench: Bench, python: str) -> None:
        document = yaml.safe_load(SPEC.read_text(encoding="utf-8"))
        document["engine"]["python"] = python
        self._bench = Bench(document, bench.folder)

    def serve(
        self, wanted: Sequence[tuple[int, int, int]], *, temperatures: Sequence[float] = (), **sections: Any
    ) -> tuple[dict[tuple[int, int, int], Measured], dict[float, Measured]]:
        """All blocks for every (steps, top-k, draft tokens), then for the first at each temperature."""
        spec = self._bench.spec(**sections)
        blocks = plan_blocks(spec.workload, folder=SPEC.parent)
        configurations = [self._configuration(Space(spec), *each) for each in wanted]
        engine = self._bench.engine(spec)
        try:
            engine.launch(configurations[0], states=tuple(configurations) if len(configurations) > 1 else ())
            found = {}
            for key, configuration in zip(wanted, configurations, strict=True):
                if len(configurations) > 1:
                    assert engine.switch(configuration) is not None, "every configuration is a state of this server"
                found[key] = Measured(tuple(engine.run_block(block) for block in blocks))
            if temperatures:
                engine.switch(configurations[0])
            sampled = {
                temperature: Measured(
                    tuple(engine.run_block(replace(each, temperature=temperature)) for each in blocks)
                )
                for temperature in temperatures
            }
        finally:
            engine.close()
        return found, sampled

    def _configuration(self, space: Space, num_steps: int, topk: int, draft_tokens: int) -> Configuration:
        if num_steps == 0:
            return space.control
        wanted = (num_steps, topk, draft_tokens)
        return next(
            each
            for each in space.configurations()
            if (each.num_steps, each.eagle_topk, each.num_draft_tokens) == wanted
        )


@pytest.fixture(scope="module")
def miniature(bench: Bench, document: Mapping[str, Any]) -> Miniature:
    return Miniature(bench, document["engine"]["python"])


@pytest.fixture(scope="module")
def plain(miniature: Miniature) -> Measured:
    found, _ = miniature.serve([(0, 1, 1)])
    return found[0, 1, 1]


@dataclass(frozen=True, slots=True)
class Chains:
    by_steps: Mapping[int, Measured]
    hot: Measured
    """The longest chain at temperature 1."""


@pytest.fixture(scope="module")
def chains(miniature: Miniature) -> Chains:
    wanted = [(steps, 1, steps + 1) for steps in reversed(STEPS)]
    found, sampled = miniature.serve(wanted, temperatures=[1.0])
    return Chains({steps: found[steps, 1, steps + 1] for steps in STEPS}, sampled[1.0])


@pytest.fixture(scope="module")
def trees(miniature: Miniature) -> Mapping[tuple[int, int], Measured]:
    search = {"num_steps": sorted({steps for steps, _ in TREES}), "eagle_topk": [2], "num_draft_tokens": [4, 6]}
    found, _ = miniature.serve([(steps, 2, tokens) for steps, tokens in reversed(TREES)], search=search)
    return {(steps, tokens): found[steps, 2, tokens] for steps, tokens in TREES}


@pytest.fixture(scope="module")
def shuffled(miniature: Miniature, document: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The same drafter, but each weight of its first projection reads another element of the taps."""
    drafter = tmp_path_factory.mktemp("shuffled") / "drafter"
    shutil.copytree(MODELS / "drafter", drafter)
    words = [ROOT / document["engine"]["python"], "-c", SHUFFLE, drafter / "model.safetensors"]
    subprocess.run(list(map(str, words)), check=True, cwd=ROOT)
    found, _ = miniature.serve([(4, 1, 5)], drafters={"shuffled": str(drafter)})
    return found[4, 1, 5]


def test_greedy_text_is_that_of_no_speculation(
    plain: Measured, chains: Chains, trees: Mapping[tuple[int, int], Measured], shuffled: Measured
) -> None:
    assert len(set(plain.texts)) == len(plain.texts) == 6
    for measured in (*chains.by_steps.values(), *trees.values(), shuffled):
        assert measured.texts == plain.texts


def test_accept_length_is_that_of_a_useful_drafter_and_rises_with_steps(chains: Chains) -> None:
    lengths = [chains.by_steps[steps].accept_length for steps in STEPS]

    assert 1.8 < chains.by_steps[4].accept_length < 3.5
    assert lengths == sorted(lengths)
    for fewer, more in itertools.pairwise(lengths):
        assert more - fewer > 0.1


def test_longest_chain_predicts_the_shorter_ones(chains: Chains) -> None:
    longest = chains.by_steps[STEPS[-1]]
    for steps in STEPS[:-1]:
        predicted, measured = longest.as_if_shorter(steps), chains.by_steps[steps]
        expected = sum(predicted) / len(predicted)
        error = math.hypot(standard_error(predicted), measured.error)
        assert abs(expected - measured.accept_length) < 3 * error
        assert error < 0.2, "otherwise any prediction passes"


def test_accept_length_is_what_training_expects_of_the_same_text(chains: Chains, document: Mapping[str, Any]) -> None:
    """Training unrolls draft steps as the server drafts: cycle for cycle, over the target's own text."""
    words = [document["engine"]["python"], "-m", "benchmarks.miniature.expected", str(MODELS), str(SPEC)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)

    expected = {int(tokens): count for tokens, count in json.loads(done.stdout).items()}

    assert expected == Counter(chains.by_steps[5].tokens)


def test_tree_beats_a_chain_of_its_depth_and_loses_to_a_chain_of_its_size(
    chains: Chains, trees: Mapping[tuple[int, int], Measured]
) -> None:
    """A drafter this sure of itself gains more from a further step than from a second choice."""
    assert trees[3, 6].accept_length > trees[3, 4].accept_length
    assert trees[3, 6].accept_length > chains.by_steps[3].accept_length
    assert trees[3, 6].accept_length < chains.by_steps[5].accept_length
    assert max(trees[3, 6].tokens) == 4


def test_temperature_lowers_the_accept_length(chains: Chains, plain: Measured) -> None:
    greedy, hot = chains.by_steps[5], chains.hot

    assert hot.texts != plain.texts
    assert hot.accept_length > 1.2
    assert greedy.accept_length - hot.accept_length > 4 * math.hypot(greedy.error, hot.error)


def test_drafter_with_shuffled_taps_is_nearly_inert(shuffled: Measured, chains: Chains) -> None:
    assert shuffled.accept_length < 1.3
    assert shuffled.accept_length < chains.by_steps[1].accept_length
