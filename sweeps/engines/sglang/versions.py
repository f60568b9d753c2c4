"""Supported SGLang releases, and all that is known to differ between them.

| from | what changed | handled in |
|---|---|---|
| 0.5.17 | CUDA_MODULE_LOADING is no longer overwritten | `sweeps.engines.env_sources` |
| 0.5.18 | the log has `server_args=` as a dict literal; before, as `ServerArgs(name=value)` | `server_log` reads both |
| 0.5.18 | --enable-deterministic-inference sets the channel counts too | `limits` |
| 0.5.20 | NCCL_GRAPH_REGISTER=0 if it is unset | `sweeps.nccl.grammar`, `sweeps.engines.env_sources` |

Everything else that the engine relies on was read in each of these releases and is the same in all of them: log lines,
endpoints, trace annotations, and the calls that the probe wraps (its own table,
`specsweep_probe.targets`, runs in the server and cannot import this one; a test compares the two). To support a further
release: read these places in it, add it here and there, and run `make test-engine-all` with it.
"""

from __future__ import annotations

import re

Release = tuple[int, int, int]

SUPPORTED = ("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""Oldest first."""

STATE_ALGORITHMS = frozenset({"EAGLE", "EAGLE3"})
"""Speculative algorithms whose worker builds runtime states (`build_adaptive_runtime_state`)."""


def release_of(version: str | None) -> Release | None:
    """(0, 5, 17) of `0.5.17`, `v0.5.17.post1` or `0.5.17+cpu`; None for anything else."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def supported(version: str) -> Release:
    """The release of a member of SUPPORTED. Raises ValueError for any other version."""
    release = release_of(version)
    if version not in SUPPORTED or release is None:
        raise ValueError(f"SGLang: wanted one of {', '.join(SUPPORTED)}, got {version!r}")
    return release


OLDEST, NEWEST = supported(SUPPORTED[0]), supported(SUPPORTED[-1])
