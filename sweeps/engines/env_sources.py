"""Who else sets environment variables of the server: the engine's own rules and NCCL's configuration files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfFile:
    """An NCCL configuration file that this node's processes read beside their environment."""

    path: str
    sha256: str
    settings: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """Who writes over a variable, and what would leave it alone."""

    value: str
    when: str
    allow: str


OVERRIDES: Mapping[str, tuple[Override, ...]] = {
    "NCCL_CUMEM_ENABLE": (
        Override(value="1", when="--enable-symm-mem", allow="leave out --enable-symm-mem"),
        Override(value="0", when="the engine's default where it is unset", allow="set it explicitly"),
    ),
    "NCCL_NVLS_ENABLE": (
        Override(
            value="1",
            when="--enable-nccl-nvls or --enable-symm-mem",
            allow="leave out --enable-nccl-nvls/--enable-symm-mem",
        ),
        Override(value="0", when="the engine's default where it is unset", allow="set it explicitly"),
    ),
    "NCCL_GRAPH_MIXING_SUPPORT": (
        Override(value="0", when="dcp-size > 1 with --enable-symm-mem", allow="leave out --enable-symm-mem"),
    ),
    "NCCL_GRAPH_REGISTER": (
        Override(value="0", when="the engine's default where it is unset", allow="set it explicitly"),
    ),
    "NCCL_ALGO": (
        Override(
            value="allreduce:tree",
            when="--enable-deterministic-inference",
            allow="leave out --enable-deterministic-inference",
        ),
    ),
    "NCCL_MIN_NCHANNELS": (
        Override(
            value="8", when="--enable-deterministic-inference", allow="leave out --enable-deterministic-inference"
        ),
    ),
    "NCCL_MAX_NCHANNELS": (
        Override(
            value="8", when="--enable-deterministic-inference", allow="leave out --enable-deterministic-inference"
        ),
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        Override(value="8", when="the engine, always", allow="no flag: it cannot be swept"),
    ),
    "CUDA_MODULE_LOADING": (Override(value="AUTO", when="the engine up to 0.5.16, always", allow="a later version"),),
}
"""SGLang's `_set_envs_and_config` and argument hooks, 0.5.16 to 0.5.23."""


def nccl_conf_files(environment: Mapping[str, str], *, system: Path = Path("/etc/nccl.conf")) -> tuple[ConfFile, ...]:
    """The files that NCCL reads for a process with `environment`; of two that set a variable, the first has its way.

    None of them writes over a variable that the environment sets.
    """
    named = environment.get("NCCL_CONF_FILE")
    home = environment.get("HOME")
    user = Path(named) if named else Path(home) / ".nccl.conf" if home else None
    return tuple(_read_conf(path) for path in (user, system) if path is not None and path.is_file())


def _read_conf(path: Path) -> ConfFile:
    content = path.read_bytes()
    lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines()]
    pairs = [line.partition("=") for line in lines if "=" in line and not line.startswith("#")]
    return ConfFile(
        path=str(path),
        sha256=hashlib.sha256(content).hexdigest(),
        settings={name.strip(): value.strip() for name, _, value in pairs},
    )
