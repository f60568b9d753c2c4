from __future__ import annotations

from ray_jobs.plan import unused_values
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Space

SPEC = """
sweep: s
engine: {kind: simulated, machine: h200-nvlink-x8}
search: {num_steps: [0, 1, 2], eagle_topk: [1], num_draft_tokens: [2, 3, 24]}
drafters: {eagle3: org/drafter}
"""


def test_values_that_no_configuration_has_are_told() -> None:
    spec = parse_spec(SPEC, source="s.yaml")
    assert unused_values(spec, Space(spec)) == ["search.num_draft_tokens: no configuration has 24"]


def test_a_space_that_uses_every_value_tells_nothing() -> None:
    spec = parse_spec(SPEC.replace(", 24]", "]"), source="s.yaml")
    assert unused_values(spec, Space(spec)) == []
