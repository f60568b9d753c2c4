"""The text of a first spec, and why each choice in it was made. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from ray_jobs.first_spec.found import Gpus, ModelFolder
from sweeps.spec.document import SpecError

_LOAD_BYTES_PER_S = 250e6
"""Cold read of weights from a disk: 595 GB of Kimi-K2.5 in 2,400 s, the deadline of `kimi_k25_8gpu.yaml`."""
_SHORTEST_LOAD_S = 600.0
_MEMORY_FRACTION = 0.85
"""`mem-fraction-static` of `kimi_k25_8gpu.yaml`: weights and KV cache; the rest is for graphs and states."""
_SIX: Mapping[str, str | int] = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": 16,
    "NCCL_BUFFSIZE": 16777216,
    "NCCL_NTHREADS": 512,
}
"""The six variables that are passed around for PCIe nodes; here to be tested."""
_ON_PCIE: Mapping[str, Mapping[str, str | int]] = {
    "p2p-sys": {"NCCL_P2P_LEVEL": "SYS"},
    "p2p-sys-ll": {"NCCL_P2P_LEVEL": "SYS", "NCCL_PROTO": "LL"},
    "six": _SIX,
}
_ON_NVLINK: Mapping[str, Mapping[str, str | int]] = {
    "ll-ring": {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"},
    "tree": {"NCCL_ALGO": "allreduce:tree"},
    "six": _SIX,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstSpec:
    """A spec and the reasons for it."""

    text: str
    choices: tuple[str, ...]


def compose(
    name: str, gpus: Gpus, model: ModelFolder, drafter: ModelFolder | None, *, python: str | None, prompts: str
) -> FirstSpec:
    """A spec that asks both questions: does speculation pay, and do NCCL settings matter.

    Args:
        python: interpreter of the server, if it is not this one.
        prompts: as `workload.prompts`.

    Raises SpecError if the weights do not fit the GPUs.
    """
    choices = [_says_size(gpus, model)]
    args: dict[str, Any] = {"tp-size": gpus.count, "mem-fraction-static": _MEMORY_FRACTION, "cuda-graph-max-bs": 8}
    search: dict[str, Any] = {"num_steps": [0]}
    if drafter is not None:
        search["num_steps"] = [0, 1, 2, 3, 5, 7]
        choices.append("draft steps 0 to 7: 0 is no speculation, and every sweep needs it")
    else:
        choices.append("no drafter was given, so speculation is not searched: add one with --drafter")
    sets = _nccl(gpus, args, search, choices)
    document: dict[str, Any] = {
        "sweep": name,
        "description": f"{_short(model)} on {gpus.count} x {gpus.name}",
        "engine": {
            "kind": "sglang",
            **({"python": python} if python else {}),
            "model_path": model.path,
            "args": {**args, "trust-remote-code": True},
            "deadlines_s": {"load": _load_deadline_s(model, choices)},
        },
        **({"nccl_sets": sets} if sets else {}),
        **({"drafters": {"drafter": drafter.path}} if drafter else {}),
        "search": search,
        "workload": {"prompts": prompts, "output_tokens": 512},
        "study": {
            "sampler": {"name": "cycle_model"},
            "pruner": {"name": "cycle_bound"},
            "stop_probability": 0.95,
            "max_replicates": 2,
        },
        "budget": {"gpu_hours": 8 * gpus.count},
        "resources": {"gpus": gpus.count},
    }
    choices.append("prompts: ADAPT to prompts of your own traffic; acceptance depends on the text")
    choices.append(f"budget: {8 * gpus.count} GPU hours at most; the sweep stops earlier once it is certain")
    head = "".join(f"# - {choice}\n" for choice in choices)
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120)
    return FirstSpec(text=f"# Written by `specsweep init`. Its choices:\n{head}\n{text}", choices=tuple(choices))


def _nccl(gpus: Gpus, args: dict[str, Any], search: dict[str, Any], choices: list[str]) -> Mapping[str, Any]:
    """NCCL sets by link; adds to `args`, `search` and `choices`."""
    if gpus.count == 1:
        choices.append("one GPU: nothing to reduce, so no NCCL sets")
        return {}
    speculates = len(search["num_steps"]) > 1
    if gpus.nvlink:
        search["args"] = {"disable-custom-all-reduce": [False, True]}
        search["nccl"] = ["default", *_ON_NVLINK]
        choices.append(
            "NVLink: SGLang's own kernel does the all-reduces, so it is searched beside NCCL; attention backend as "
            "SGLang chooses it, chains only"
        )
        return _ON_NVLINK
    search["nccl"] = ["default", *_ON_PCIE]
    choices.append(
        "PCIe: NCCL does the all-reduces; with IOMMU or ACS on, NCCL_P2P_LEVEL=SYS can hang: `specsweep check`"
    )
    if speculates:
        args["attention-backend"] = "triton"
        search["eagle_topk"] = [1, 4]
        choices.append("trees of top-k 4 beside chains; attention backend triton, which can run both")
    return _ON_PCIE


def _says_size(gpus: Gpus, model: ModelFolder) -> str:
    """How the weights lie on the GPUs. Raises SpecError if they do not fit."""
    link = "NVLink" if gpus.nvlink else "PCIe"
    machine = f"{gpus.count} x {gpus.name}, {gpus.memory_bytes / 2**30:.0f} GiB each, {link}"
    if model.weights_bytes is None:
        return f"{machine}; tensor parallel over all of them; {model.path} is a name on a model hub: download it first"
    share_bytes = model.weights_bytes / gpus.count
    if share_bytes > _MEMORY_FRACTION * gpus.memory_bytes:
        raise SpecError(
            f"{model.path}: {share_bytes / 2**30:.0f} GiB of weights a GPU do not fit {gpus.memory_bytes / 2**30:.0f} "
            f"GiB at mem-fraction-static {_MEMORY_FRACTION}; wanted more GPUs or smaller weights"
        )
    return f"{machine}; tensor parallel over all of them, {share_bytes / 2**30:.1f} GiB of weights each"


def _load_deadline_s(model: ModelFolder, choices: list[str]) -> float:
    if model.weights_bytes is None:
        choices.append("load deadline: the default; a download during the launch would count against it")
        return 1800.0
    deadline_s = max(_SHORTEST_LOAD_S, round(model.weights_bytes / _LOAD_BYTES_PER_S, -1))
    choices.append(f"load deadline: {deadline_s:.0f} s, for a cold disk of 250 MB/s")
    return deadline_s


def _short(model: ModelFolder) -> str:
    return model.path.rstrip("/").rpartition("/")[2]
