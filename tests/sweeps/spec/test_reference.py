"""The generated reference: complete, up to date, and a schema that shipped specs pass."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sweeps.spec.reading import SHIPPED
from sweeps.spec.reference import json_schema, main, markdown

PAGE = Path(__file__).parents[3] / "docs" / "spec.md"
SPECS = sorted(SHIPPED.glob("*.yaml"))


def keys(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for section in (schema, *schema["$defs"].values()):
        for name, entry in section["properties"].items():
            yield f"{section['title']}.{name}", entry


def test_the_page_is_what_the_dataclasses_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: python -m sweeps.spec.reference --markdown > docs/spec.md"
    )


def test_every_key_is_described() -> None:
    assert not [name for name, entry in keys(json_schema()) if "description" not in entry and "$ref" not in entry]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_pass_the_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), json_schema())


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("engine", "knd", "sglang"),
        ("search", "num_steps", [-1]),
        ("search", "eagle_topk", ["many"]),
        ("workload", "concurrency", 0),
        ("study", "stop_within", 1.0),
        ("checks", "inert_draft", "maybe"),
    ],
)
def test_the_schema_refuses_what_reading_refuses(section: str, key: str, value: object) -> None:
    document = yaml.safe_load((SHIPPED / "founding_case.yaml").read_text(encoding="utf-8"))
    document[section] = {**document.get(section, {}), key: value}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, json_schema())


def test_one_number_and_numbers_as_variables_pass_as_they_do_when_read() -> None:
    document = yaml.safe_load((SHIPPED / "founding_case.yaml").read_text(encoding="utf-8"))
    document["workload"]["concurrency"] = 1
    document["nccl_sets"] = {"threads": {"NCCL_NTHREADS": 512}}
    jsonschema.validate(document, json_schema())


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
