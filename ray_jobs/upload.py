"""What a job needs from this machine: the project's packages, the spec, and the files that the spec names.

Nothing else is uploaded: no checkout, no recordings, no results. Weights are not uploaded either; a spec names them by
a path that every node has.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sweeps.engines.command import PROJECT
from sweeps.nccl.catalogue import CATALOGUE
from sweeps.spec.document import SpecError
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import SHIPPED, find_spec, parse_spec, read_spec

LIMIT_BYTES = 512 << 20
"""Ray's limit for a job's working directory (`GCS_STORAGE_MAX_SIZE` of Ray 2.60, 512 MiB)."""

_PACKAGES = ("sweeps", "ray_jobs")
_SPEC_FOLDER = PurePosixPath("job")


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A working directory to be: what goes where."""

    spec: str
    """Path of the spec inside the directory."""
    files: Mapping[PurePosixPath, Path]
    """Path inside the directory -> file on this machine."""

    @property
    def size_bytes(self) -> int:
        """Of all files, before Ray compresses them."""
        return sum(path.stat().st_size for path in self.files.values())

    def write(self, folder: Path) -> None:
        """Copy everything into `folder`."""
        for inside, path in self.files.items():
            target = folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def plan_upload(given: Path) -> Upload:
    """The upload for a spec file or the name of a shipped spec. Raises SpecError if it cannot be submitted."""
    path = find_spec(given).resolve()
    read_spec(path)
    files = dict(_packages())
    if path.parent == SHIPPED.resolve():
        return Upload(spec=f"sweeps/specs/{path.name}", files=files)
    spec = parse_spec(path.read_text(encoding="utf-8"), source=str(path))
    _refuse_local_weights(spec, path.parent)
    files[_SPEC_FOLDER / path.name] = path
    for key, name in _named_files(spec):
        if Path(name).is_absolute() or not (path.parent / name).is_file():
            continue  # an absolute path is looked up on the nodes, and a name is not a file
        inside = PurePosixPath(Path(name).as_posix())
        if ".." in inside.parts or name.startswith("~"):
            raise SpecError(
                f"{path}: {key}: {name} lies outside the spec's folder and would not be uploaded; wanted a path below "
                f"{path.parent}, or an absolute path that every node has"
            )
        files[_SPEC_FOLDER / inside] = path.parent / name
    return Upload(spec=str(_SPEC_FOLDER / path.name), files=files)


def _packages() -> Iterator[tuple[PurePosixPath, Path]]:
    """Every file of the project's packages that a job imports or reads."""
    for package in _PACKAGES:
        for path in sorted((PROJECT / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield PurePosixPath(path.relative_to(PROJECT).as_posix()), path


def _named_files(spec: SweepSpec) -> Iterator[tuple[str, str]]:
    """Key and value of what may be a small file beside the spec."""
    if spec.workload.prompts != "synthetic":
        yield "workload.prompts", spec.workload.prompts
    if spec.engine.machine is not None:
        yield "engine.machine", spec.engine.machine
    for set_name, variables in spec.nccl_sets.items():
        for name, value in variables.items():
            if name in CATALOGUE and CATALOGUE[name].values == "path":
                yield f"nccl_sets.{set_name}.{name}", value


def _refuse_local_weights(spec: SweepSpec, folder: Path) -> None:
    """Weights, interpreters and recordings stay where they are: a relative path to one means nothing on a node."""
    named = {
        "engine.model_path": spec.engine.model_path,
        "engine.python": spec.engine.python,
        "engine.recording": spec.engine.recording,
        **{f"drafters.{name}": path for name, path in spec.drafters.items()},
    }
    for key, value in named.items():
        if value is None or Path(value).is_absolute():
            continue
        if any((base / Path(value).expanduser()).exists() for base in (folder, PROJECT)):
            raise SpecError(f"{key}: {value} is a path of this machine; wanted an absolute path that every node has")
