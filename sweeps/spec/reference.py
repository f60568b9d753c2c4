"""The reference of a spec's keys, read from the dataclasses of `model`: a JSON schema for editors, and a page.

    python -m sweeps.spec.reference --markdown > docs/spec.md

The schema knows names, types and ranges. What must hold between values, `checks` alone knows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from sweeps.spec.model import SweepSpec

Schema = Mapping[str, Any]

_HEAD = """# Keys of a spec

This page is generated from `sweeps/spec/model.py` (`python -m sweeps.spec.reference --markdown`). The command
`specsweep schema` prints the same as a JSON schema. Editors with a YAML language server then check and complete a spec
that begins with `# yaml-language-server: $schema=specsweep.schema.json`. `specsweep dry-run SPEC` checks what a schema
cannot: names, trees, NCCL variables, and what must hold between values.
"""


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a spec's YAML."""
    schema = TypeAdapter(SweepSpec).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Specsweep spec"}


def markdown() -> str:
    """One table for the top level, and one for each section, in the order of the dataclasses."""
    schema = json_schema()
    definitions: Mapping[str, Schema] = schema["$defs"]
    parts = [_HEAD, _table("", schema, definitions)]
    parts += [
        f"## {path}\n\n{_one_line(section['description'])}\n\n{_table(path, section, definitions)}"
        for path, section in _sections("", schema, definitions)
    ]
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Print the JSON schema, or with `--markdown` the page. Returns 0."""
    parser = argparse.ArgumentParser(prog=prog, description="the keys of a spec, as a JSON schema")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/spec.md instead")
    arguments = parser.parse_args(argv)
    sys.stdout.write(markdown() if arguments.markdown else json.dumps(json_schema(), indent=2) + "\n")
    return 0


def _sections(path: str, schema: Schema, definitions: Mapping[str, Schema]) -> Iterator[tuple[str, Schema]]:
    """Each nested section with its dotted path, a section before the ones inside it."""
    for name, entry in schema["properties"].items():
        if (section := _section(entry, definitions)) is not None:
            inner = f"{path}.{name}" if path else name
            yield inner, section
            yield from _sections(inner, section, definitions)


def _section(entry: Schema, definitions: Mapping[str, Schema]) -> Schema | None:
    """The section that a key holds; None for a plain value."""
    reference = str(entry.get("$ref", ""))
    return definitions[reference.rpartition("/")[2]] if reference else None


def _table(path: str, section: Schema, definitions: Mapping[str, Schema]) -> str:
    required = section.get("required", ())
    rows = ["| key | value | default | what it is |", "|---|---|---|---|"]
    for name, entry in section["properties"].items():
        inner = _section(entry, definitions)
        key = f"{path}.{name}" if path else name
        if inner is not None:
            value, what = "a section", f"see [{key}](#{key.replace('.', '')})"
        else:
            value, what = _type(entry), _one_line(entry["description"])
        default = "required" if name in required else _default(entry, is_section=inner is not None)
        rows.append(" | ".join(("| `" + name + "`", value, default, what + " |")))
    return "\n".join(rows) + "\n"


def _type(entry: Schema) -> str:
    """In words: `whole number >= 1`, `list of text`, `"refuse" or "allow"`."""
    if "anyOf" in entry:
        return " or ".join(dict.fromkeys(_type(each) for each in entry["anyOf"] if each.get("type") != "null"))
    if "enum" in entry or "const" in entry:
        return " or ".join(f"`{each}`" for each in entry.get("enum", [entry.get("const")]))
    match entry.get("type"):
        case "array":
            return f"list of {_type(entry['items'])}"
        case "object":
            values = entry.get("additionalProperties", True)
            return "mapping" if values is True else f"mapping to {_type(values)}"
        case "boolean":
            return "true or false"
        case "string":
            return "text"
        case "integer" | "number" as kind:
            return f"{'whole number' if kind == 'integer' else 'number'}{_range(entry)}"
        case _:
            return "any value"


def _range(entry: Schema) -> str:
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    found = [f"{sign} {entry[name]:g}" for name, sign in limits.items() if name in entry]
    return " " + " and ".join(found) if found else ""


def _default(entry: Schema, *, is_section: bool) -> str:
    value = entry.get("default")
    if is_section or value in (None, "", [], {}):
        return "-"
    return f"`{json.dumps(value)}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    sys.exit(main())
