"""What a simulated server would leave as proof: evidence rows graded as for a real one, and kernel times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sweeps.engines.all_reduce_backend import RankFacts
from sweeps.engines.argument_evidence import grade_arguments
from sweeps.engines.base import Evidence, KernelTime
from sweeps.engines.env_sources import ConfFile
from sweeps.engines.evidence import grade_environment
from sweeps.engines.simulated.expected_cycle import ExpectedCycle
from sweeps.engines.simulated.machine_profile import MachineProfile
from sweeps.nccl.catalogue import CATALOGUE
from sweeps.nccl.log import NcclLog, Operation
from sweeps.spec.space import Configuration

_TRANSPORTS = {"P2P": "P2P/IPC", "SHM": "SHM/direct/direct", "NET": "NET/Socket/0"}
_KERNELS = {
    "custom": "cross_device_reduce_1stage",
    "pcie_ipc": "pcie_ipc_allreduce_oneshot",
}


def evidence_of(
    profile: MachineProfile, configuration: Configuration, mean: ExpectedCycle, requested: Mapping[str, str]
) -> tuple[Evidence, ...]:
    """Rows for every rank, with the profile's interventions as the hands that they stand for.

    Args:
        requested: environment variables of the launch.
    """
    environment, files, unseen = dict(requested), [], set()
    for intervention in profile.interventions:
        kind, _, variable = intervention.setting.partition(".")
        if kind != "env" or (intervention.only_if_unset and variable in requested):
            continue
        if intervention.by.endswith(".conf"):
            files.append(ConfFile(path=intervention.by, sha256="0" * 64, settings={variable: intervention.value}))
            unseen |= {variable} - requested.keys()
        environment[variable] = intervention.value
    log = _nccl_log(profile, configuration, mean, environment)
    seen = {name: value for name, value in environment.items() if name not in unseen}
    facts = [RankFacts(rank=rank, environment=seen, nccl=log) for rank in range(profile.num_gpus)]
    rows = grade_environment(
        requested, facts, num_ranks=profile.num_gpus, all_reduce=mean.all_reduce, conf_files=tuple(files)
    )
    return rows + grade_arguments(*_arguments(profile, configuration))


def kernels_of(profile: MachineProfile, configuration: Configuration, mean: ExpectedCycle) -> tuple[KernelTime, ...]:
    """Kernel time by phase; phase `verify` is the target forward, also of a plain decode step."""
    forward, drafting = profile.forward, profile.drafting
    kernel = (
        f"ncclDevKernel_AllReduce_Sum_bf16_{'TREE' if mean.nccl.algo == 'Tree' else 'RING'}_LL" if mean.nccl else ""
    )
    kernel = kernel or _KERNELS.get(mean.all_reduce, mean.all_reduce)
    rows = [
        KernelTime(
            phase="verify",
            kind="communication",
            kernel=kernel,
            us_per_cycle=1000.0 * mean.communication_ms,
            calls_per_cycle=float(forward.all_reduces),
        ),
        KernelTime(
            phase="verify",
            kind="moe",
            kernel="fused_moe_kernel",
            us_per_cycle=1000.0 * mean.moe_ms,
            calls_per_cycle=forward.all_reduces / 2.0,
        ),
        KernelTime(
            phase="verify",
            kind="other",
            kernel="attention, dense GEMMs and what the profile does not tell apart",
            us_per_cycle=1000.0 * (mean.verify_forward_ms - mean.communication_ms - mean.moe_ms),
            calls_per_cycle=float(forward.all_reduces),
        ),
    ]
    if mean.draft_ms is None or mean.extend_ms is None or mean.verify_ms is None:
        return tuple(rows)
    calls = float(configuration.num_steps * drafting.all_reduces_per_step)
    rows += _drafter_kernels("draft", kernel, mean.draft_ms, mean.draft_communication_ms, calls)
    calls = float(drafting.all_reduces_per_step)
    rows += _drafter_kernels("extend", kernel, mean.extend_ms, mean.extend_communication_ms, calls)
    rows.append(
        KernelTime(
            phase="verify",
            kind="sampling",
            kernel="tree mask, acceptance",
            us_per_cycle=1000.0 * (mean.verify_ms - mean.verify_forward_ms),
            calls_per_cycle=1.0,
        )
    )
    return tuple(rows)


def _drafter_kernels(
    phase: Literal["draft", "extend"], kernel: str, phase_ms: float, communication_ms: float, calls: float
) -> list[KernelTime]:
    return [
        KernelTime(
            phase=phase,
            kind="communication",
            kernel=kernel,
            us_per_cycle=1000.0 * communication_ms,
            calls_per_cycle=calls,
        ),
        KernelTime(
            phase=phase,
            kind="other",
            kernel="drafter",
            us_per_cycle=1000.0 * (phase_ms - communication_ms),
            calls_per_cycle=1.0,
        ),
    ]


def _nccl_log(
    profile: MachineProfile, configuration: Configuration, mean: ExpectedCycle, environment: Mapping[str, str]
) -> NcclLog:
    read = {name: value for name, value in environment.items() if name in CATALOGUE}
    if mean.nccl is None:
        return NcclLog(set_by_environment=read)
    operation = Operation(
        collective="AllReduce",
        num_bytes=(configuration.num_draft_tokens or 1) * profile.forward.message_bytes_per_token,
        algorithm=mean.nccl.algo,
        protocol=mean.nccl.proto,
        channels=1,
    )
    transports = frozenset({_TRANSPORTS[mean.nccl.transport]})
    return NcclLog(set_by_environment=read, operations=(operation,), transports=transports)


def _arguments(profile: MachineProfile, configuration: Configuration) -> tuple[dict[str, str], dict[str, str | None]]:
    """Requested and resolved server arguments, by the resolved names."""
    requested = {name.replace("-", "_"): str(value) for name, value in configuration.args}
    if configuration.speculates:
        requested["speculative_num_steps"] = str(configuration.num_steps)
        requested["speculative_eagle_topk"] = str(configuration.eagle_topk)
        requested["speculative_num_draft_tokens"] = str(configuration.num_draft_tokens)
    forced = {
        each.setting.removeprefix("args.").replace("-", "_"): each.value
        for each in profile.interventions
        if each.setting.startswith("args.") and not each.only_if_unset
    }
    resolved: dict[str, str | None] = {**requested, **forced}
    return requested, resolved
