"""Write a first spec from what this node has: `specsweep init --model FOLDER [--drafter FOLDER] [--out FILE]`.

Run it on the GPU node. Nothing is started and nothing is changed but the file that it writes (and a copy of the shipped
prompts beside it).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ray_jobs.first_spec.compose import FirstSpec, compose
from ray_jobs.first_spec.found import Gpus, look_at_gpus, read_model, sglang_version
from sweeps import SpecsweepError
from sweeps.engines.sglang.versions import SUPPORTED
from sweeps.foreign_text import one_line, print_error
from sweeps.spec.document import SpecError
from sweeps.spec.reading import SHIPPED, parse_spec

PROMPTS = SHIPPED / "prompts" / "mixed.jsonl"
"""Shipped prompts, copied beside the spec so that a job can take them along."""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m ray_jobs.init_spec") -> int:
    """Write the spec and say what was chosen. Returns 0; 2 if nothing was written."""
    arguments = _parser(prog).parse_args(argv)
    try:
        first = _first_spec(arguments)
        _write(first, arguments.out, own_prompts=arguments.prompts is not None)
    except SpecsweepError as error:
        print_error(error)
        return 2
    print(f"wrote {arguments.out}:", *(f"  - {one_line(choice)}" for choice in first.choices), sep="\n")
    print(f"  - {_says_sglang(arguments.python)}")
    print(f"next: specsweep dry-run {arguments.out}, then specsweep check {arguments.out}")
    return 0


def _first_spec(arguments: argparse.Namespace) -> FirstSpec:
    drafter = None if arguments.drafter is None else read_model(arguments.drafter)
    prompts = arguments.prompts or Path("prompts") / PROMPTS.name
    name = arguments.out.stem
    return compose(
        name, _gpus(arguments), read_model(arguments.model), drafter, python=arguments.python, prompts=str(prompts)
    )


def _says_sglang(python: str | None) -> str:
    """Which SGLang will serve; read from the interpreter's packages, without importing it."""
    version = sglang_version(python or sys.executable)
    if version is None:
        return f"no SGLang in {python or sys.executable}: name the interpreter that has it as engine.python (--python)"
    known = "" if version in SUPPORTED else f"; supported are {SUPPORTED[0]} to {SUPPORTED[-1]}"
    return f"SGLang {version} in {python or sys.executable}{known}"


def _gpus(arguments: argparse.Namespace) -> Gpus:
    """What NVML sees, or what the command line says of another node."""
    found = look_at_gpus()
    if arguments.gpus is None and found is None:
        raise SpecError("no GPU is visible here: run it on the GPU node, or give --gpus, --memory-gib and --link")
    if arguments.gpus is None:
        assert found is not None
        return found
    if arguments.memory_gib is None or arguments.link is None:
        raise SpecError("--gpus says that the node is another one: give --memory-gib and --link as well")
    return Gpus(
        name=arguments.gpu_name,
        count=arguments.gpus,
        memory_bytes=int(arguments.memory_gib * 2**30),
        nvlink=arguments.link == "nvlink",
    )


def _write(first: FirstSpec, out: Path, *, own_prompts: bool) -> None:
    """Write spec and prompts. Raises SpecError if the file exists, or the spec would not be accepted."""
    if out.exists():
        raise SpecError(f"{out} exists; wanted a new file (--out)")
    prompts = out.parent / "prompts" / PROMPTS.name
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if not own_prompts and not prompts.exists():
            prompts.parent.mkdir(exist_ok=True)
            shutil.copyfile(PROMPTS, prompts)
        parse_spec(first.text, source=str(out), folder=out.resolve().parent)
        out.write_text(first.text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{out} cannot be written: {error.strerror}") from error


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="write a first spec from what this node has")
    parser.add_argument("--model", required=True, help="folder of the target, or its name on a model hub")
    parser.add_argument("--drafter", help="folder of the EAGLE-3 drafter, or its name on a model hub")
    parser.add_argument("--out", type=Path, default=Path("sweep.yaml"), help="the file to write (sweep.yaml)")
    parser.add_argument("--prompts", type=Path, help="JSON Lines file of prompts, relative to the spec's folder")
    parser.add_argument("--python", help="the server's interpreter, if SGLang is in another environment")
    other = parser.add_argument_group("for another node than this one")
    other.add_argument("--gpus", type=int, help="number of its GPUs")
    other.add_argument("--memory-gib", type=float, help="memory of one GPU")
    other.add_argument("--link", choices=("nvlink", "pcie"), help="how its GPUs talk to each other")
    other.add_argument("--gpu-name", default="GPU", help="model of its GPUs, for the description")
    return parser


if __name__ == "__main__":
    sys.exit(main())
