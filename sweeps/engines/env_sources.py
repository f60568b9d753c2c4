"""Who else sets environment variables of the server: the engine's own rules and NCCL's configuration files."""

from __future__ import annotations

import hashlib
import os
import pwd
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
    only_if_unset: bool = False
    """Leaves a variable alone that is set: then it explains nothing."""


OVERRIDES: Mapping[str, tuple[Override, ...]] = {
    "NCCL_CUMEM_ENABLE": (
        Override(value="1", when="--enable-symm-mem", allow="leave out --enable-symm-mem"),
        Override(value="0", when="the engine's default if it is unset", allow="set it explicitly", only_if_unset=True),
    ),
    "NCCL_NVLS_ENABLE": (
        Override(
            value="1",
            when="--enable-nccl-nvls or --enable-symm-mem",
            allow="leave out --enable-nccl-nvls/--enable-symm-mem",
        ),
        Override(value="0", when="the engine's default if it is unset", allow="set it explicitly", only_if_unset=True),
    ),
    "NCCL_GRAPH_MIXING_SUPPORT": (
        Override(value="0", when="dcp-size > 1 with --enable-symm-mem", allow="leave out --enable-symm-mem"),
    ),
    "NCCL_GRAPH_REGISTER": (
        Override(value="0", when="the engine's default if it is unset", allow="set it explicitly", only_if_unset=True),
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
"""SGLang's `_set_envs_and_config` and argument hooks, in the supported releases (`sglang.versions`)."""


def nccl_conf_files(
    environment: Mapping[str, str], *, system: Path = Path("/etc/nccl.conf"), home: Path | None = None
) -> tuple[ConfFile, ...]:
    """The files that NCCL reads for a process with `environment`, in NCCL's order (`initEnvFunc` of src/misc/param.cc).

    The first is the file that NCCL_CONF_FILE names, or `.nccl.conf` in the home of the user's account if it names none.
    The second is `system`. A variable keeps the first value that it gets: the environment's, then the first file's.

    Args:
        home: in place of the account's home; NCCL does not look at HOME.
    """
    named = environment.get("NCCL_CONF_FILE")
    folder = home if home is not None else _home()
    user = Path(named) if named else folder / ".nccl.conf" if folder else None
    return tuple(_read_conf(path) for path in (user, system) if path is not None and path.is_file())


def _home() -> Path | None:
    """Home of this process's user; None for a user without an account, for whom NCCL reads no such file."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def _read_conf(path: Path) -> ConfFile:
    """NCCL takes names and values as they stand, blanks included, and a name's first line."""
    content = path.read_bytes()
    settings: dict[str, str] = {}
    for line in content.decode("utf-8", "replace").split("\n"):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(name, value)
    return ConfFile(path=str(path), sha256=hashlib.sha256(content).hexdigest(), settings=settings)
