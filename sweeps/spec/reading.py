"""From a YAML file to a checked `SweepSpec`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sweeps.nccl.catalogue import CATALOGUE
from sweeps.spec.checks import check_spec
from sweeps.spec.document import SpecError, read_document, refuse, validation_problems
from sweeps.spec.hidden import redacted_text
from sweeps.spec.model import SweepSpec
from sweeps.spec.yaml_text import read_text

_ADAPTER = TypeAdapter(SweepSpec)

SHIPPED = Path(__file__).parents[1] / "specs"
"""Specs that come with the package."""


def find_spec(given: Path) -> Path:
    """`given` if it is a file, else the shipped spec of that name (`founding_case`). Raises SpecError."""
    try:
        if given.is_file():
            return given
    except PermissionError as error:
        raise SpecError(f"SPEC: {given} cannot be read: {error.strerror}") from error
    names = [path.stem for path in sorted(SHIPPED.glob("*.yaml"))]
    if str(given) in names:
        return SHIPPED / f"{given}.yaml"
    if given.exists():
        raise SpecError(f"SPEC: wanted a YAML file, but {given} is a folder")
    raise SpecError(
        f"SPEC: wanted a YAML file or the name of a shipped spec ({', '.join(names)}), but {given} does not exist"
    )


def read_spec(path: Path) -> SweepSpec:
    """Read and check one spec file; its relative paths count from its folder. Raises SpecError."""
    text = read_text(path)
    return parse_spec(text, source=str(path), folder=path.resolve().parent)


def parse_spec(text: str, *, source: str, folder: Path | None = None) -> SweepSpec:
    """Check spec text; `source` is named in errors, `folder` is where relative paths count from. Raises SpecError."""
    document = read_document(text, source=source)
    refuse(document.problems, source=source, lines=document.lines)
    try:
        spec = _ADAPTER.validate_python(document.values)
    except ValidationError as error:
        refuse(validation_problems(error, SweepSpec), source=source, lines=document.lines)
        raise
    spec = _anchored(spec, folder) if folder else spec
    refuse(check_spec(spec), source=source, lines=document.lines)
    return spec


def fingerprint(text: str) -> str:
    """Twelve hex digits that identify spec text; a results folder accepts only its own.

    Values of secrets do not count: the folder's own `spec.yaml` has none, and another token is no other sweep.
    """
    return hashlib.sha256(redacted_text(text).encode()).hexdigest()[:12]


def _anchored(spec: SweepSpec, folder: Path) -> SweepSpec:
    """The spec with its relative paths made absolute: what starts with `./`, `../` or `~`, or exists in `folder`.

    Anything else stays as written: a name of a model hub, or a path that the engine looks up in the project's folder.
    """

    def anchored(path: str | None) -> str | None:
        if path is None or not (path.startswith(("./", "../", "~")) or (folder / path).exists()):
            return path
        return str(folder / Path(path).expanduser())

    def variables(given: Mapping[str, str]) -> Mapping[str, str]:
        files = {name for name in given if name in CATALOGUE and CATALOGUE[name].values == "path"}
        return {name: anchored(value) or value if name in files else value for name, value in given.items()}

    workload = spec.workload
    if workload.prompts != "synthetic":
        workload = replace(workload, prompts=str(folder / Path(workload.prompts).expanduser()))
    engine = spec.engine
    engine = replace(
        engine,
        machine=anchored(engine.machine),
        recording=anchored(engine.recording),
        python=anchored(engine.python),
        model_path=anchored(engine.model_path),
        env=variables(engine.env),
    )
    return replace(
        spec,
        engine=engine,
        nccl_sets={name: variables(given) for name, given in spec.nccl_sets.items()},
        drafters={name: anchored(path) or path for name, path in spec.drafters.items()},
        workload=workload,
    )
