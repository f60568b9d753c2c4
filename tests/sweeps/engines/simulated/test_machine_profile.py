from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sweeps.engines.simulated.machine_profile import PROFILES, parse_profile, read_profile
from sweeps.spec.document import SpecError

NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))
TEXT = (PROFILES / "rtx-pro-6000-pcie-x8.yaml").read_text(encoding="utf-8")


def _numbers(node: object, path: str = "") -> list[str]:
    """Dotted paths of every number below `node` that stands in a `{value, source}` pair or alone."""
    if isinstance(node, dict):
        if set(node) == {"value", "source"}:
            return [path]
        return [found for key, part in node.items() for found in _numbers(part, f"{path}.{key}".lstrip("."))]
    if isinstance(node, list):
        return [found for index, part in enumerate(node) for found in _numbers(part, f"{path}.{index}")]
    return [path] if isinstance(node, (int, float)) else []


def test_the_three_machines_are_there() -> None:
    assert set(NAMES) >= {"rtx-pro-6000-pcie-x8", "rtx-pro-6000-turin-x8", "h200-nvlink-x8"}


@pytest.mark.parametrize("name", NAMES)
def test_every_number_keeps_a_source_that_says_what_kind_it_is(name: str) -> None:
    profile = read_profile(name)
    document = yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert profile.name == name
    assert sorted(profile.sources) == sorted(_numbers(document))
    kinds = ("published", "founding case", "derived", "assumed", "measured", "Ring ")
    assert all(fault.source for fault in profile.faults)
    assert [path for path, source in profile.sources.items() if not source.startswith(kinds)] == []


def test_a_number_without_source_is_refused_by_its_path() -> None:
    bare = TEXT.replace('{value: 122, source: "derived: 61 layers x 2 (after attention, after MoE)"}', "122")
    assert bare != TEXT
    with pytest.raises(SpecError, match=r"machine\.yaml: forward\.all_reduces: 122 has no source"):
        parse_profile(bare, source="machine.yaml")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (TEXT.replace("decode_gap_ms:", "decode_gap:"), "decode_gap"),
        (TEXT.replace("proto: LL}", "proto: LL64}"), "LL64"),
        ("- a list", "wanted the mapping of a machine profile, got list"),
        ("{", "not valid YAML"),
    ],
)
def test_a_wrong_profile_is_refused(wrong: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_profile(wrong, source="machine.yaml")


def test_an_unknown_machine_names_the_nearest_and_the_choices() -> None:
    with pytest.raises(SpecError, match=r"h200-nvlink-x4.*rtx-pro-6000-pcie-x8.*did you mean h200-nvlink-x8"):
        read_profile("h200-nvlink-x4")


def test_an_unknown_drafter_names_the_choices() -> None:
    with pytest.raises(SpecError, match=r"no drafter profile 'fouding'; there are founding, kimi-k2\.5-eagle3"):
        read_profile("rtx-pro-6000-pcie-x8").drafter("fouding")


def test_a_profile_is_read_from_a_path_and_varied_by_replace(weird_tmp_path: Path) -> None:
    path = weird_tmp_path / "mine.yaml"
    path.write_text(TEXT, encoding="utf-8")
    profile = read_profile(str(path))
    noisy = replace(profile, noise=replace(profile.noise, block=4 * profile.noise.block))
    assert noisy.noise.block == pytest.approx(4 * profile.noise.block)
    assert noisy.sources is profile.sources
