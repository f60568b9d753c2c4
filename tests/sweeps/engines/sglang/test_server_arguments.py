"""Resolved arguments by the line of the log that tells them, in both spellings."""

import pytest

from sweeps.engines.sglang.server_arguments import resolved_arguments
from tests.sweeps.engines.sglang.logs import read


@pytest.mark.parametrize(
    ("name", "backend", "steps"),
    [
        ("0.5.16-standalone", "torch_native", "3"),
        ("0.5.17-eagle3-adaptive", "triton", "5"),
        ("0.5.21-eagle3", "torch_native", "3"),
    ],
)
def test_resolved_arguments_of_both_spellings(name: str, backend: str, steps: str) -> None:
    arguments = resolved_arguments(read(name))
    assert arguments["attention_backend"] == backend
    assert arguments["speculative_num_steps"] == steps
    assert arguments["speculative_draft_attention_backend"] in (None, "intel_amx")
    assert "bs=[1, 2" in str(arguments["cuda_graph_config"]) or "'bs': [1, 2" in str(arguments["cuda_graph_config"])
    assert "decode" not in arguments


def test_resolved_arguments_with_commas_brackets_and_quotes_inside() -> None:
    text = "[2026-11-29 14:55:02] server_args=ServerArgs(a='x, (y', b=F(c=[1, 2], d=<E.X: 1>), e=None, f='it\\'s')\n"
    assert resolved_arguments(text) == {"a": "x, (y", "b": "F(c=[1, 2], d=<E.X: 1>)", "e": None, "f": "it\\'s"}
    assert resolved_arguments("nothing here") == {}
