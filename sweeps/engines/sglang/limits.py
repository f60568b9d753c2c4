"""What a given SGLang version cannot run, told before a launch.

Each limit was read in the source of every release of its row. A release that is not supported refuses nothing: such a
configuration is tried, and its failure classified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sweeps.engines.sglang.versions import NEWEST, OLDEST, Release, release_of, supported
from sweeps.spec.model import Scalar
from sweeps.spec.space import Configuration


@dataclass(frozen=True, slots=True)
class Launch:
    """One configuration together with what the spec gives every server."""

    configuration: Configuration
    args: Mapping[str, Scalar]
    """`engine.args` and the configuration's own, names as on the command line."""
    env: Mapping[str, str]
    """`engine.env`, the NCCL set and the configuration's own."""

    @property
    def tree(self) -> bool:
        """Whether the drafter offers more than one candidate per step."""
        return (self.configuration.eagle_topk or 1) > 1

    @property
    def backends(self) -> frozenset[str]:
        """Attention backends that are asked for; SGLang's own choice is not known here."""
        named = (self.args.get(f"{phase}attention-backend") for phase in ("", "prefill-", "decode-"))
        return frozenset(str(backend) for backend in named if backend is not None)

    @property
    def page_size(self) -> int | None:
        """As asked for, or as an attention backend forces it; None if SGLang chooses."""
        wanted = self.args.get("page-size")
        asked = int(wanted) if isinstance(wanted, int | str) else None
        forced = [_FORCED_PAGE_SIZE[name] for name in sorted(self.backends) if name in _FORCED_PAGE_SIZE]
        return max(forced, default=asked) if asked in {None, 1} else asked

    def flag(self, name: str) -> bool:
        return str(self.args.get(name, False)).lower() in _TRUE


@dataclass(frozen=True, slots=True)
class Limit:
    """A rule and the releases, both ends included, in which it was found."""

    reason: Callable[[Launch], str | None]
    first: Release = OLDEST
    last: Release = NEWEST


_TRUE = frozenset({"true", "1", "yes", "on"})
_FORCED_PAGE_SIZE: Mapping[str, int] = {
    "flashmla": 64,
    "cutlass_mla": 128,
    "trtllm_mla": 64,
    "tokenspeed_mla": 64,
    "cutedsl_mla": 64,
    "trtllm_mha": 64,
}


def check_limits(
    configuration: Configuration,
    engine_args: Mapping[str, Scalar],
    version: str | None,
    *,
    engine_env: Mapping[str, str] | None = None,
) -> str | None:
    """Why SGLang `version` cannot run a configuration, or None if nothing speaks against it.

    Args:
        configuration: effective, as `Space.resolve` gives it.
        engine_args: `engine.args` of the spec.
        version: as the server reports it (`0.5.21`, `0.5.17.post1`); None if unknown.
        engine_env: `engine.env` of the spec.
    """
    release = release_of(version)
    if release is None:
        return None
    launch = Launch(
        configuration,
        {**engine_args, **dict(configuration.args)},
        {**(engine_env or {}), **dict(configuration.nccl_env), **dict(configuration.env)},
    )
    for limit in LIMITS:
        if limit.first <= release <= limit.last and (reason := limit.reason(launch)):
            return f"SGLang {version}: {reason}"
    return None


def _topk(launch: Launch) -> str:
    return f"top-k {launch.configuration.eagle_topk}"


def _trtllm_mha(launch: Launch) -> str | None:
    if launch.tree and "trtllm_mha" in launch.backends:
        return f"attention backend trtllm_mha speculates with top-k 1 only, got {_topk(launch)}"
    return None


def _flashmla(launch: Launch) -> str | None:
    if launch.tree and "flashmla" in launch.backends:
        return f"attention backend flashmla speculates with top-k 1 only, got {_topk(launch)}"
    return None


def _paged_tree(*allowed: str) -> Callable[[Launch], str | None]:
    """Draft trees over pages need a backend that copies the shared last page into each branch."""

    def reason(launch: Launch) -> str | None:
        backend, page_size = launch.args.get("attention-backend"), launch.page_size
        if not launch.tree or backend is None or backend in allowed or page_size is None or page_size == 1:
            return None
        backends = ", ".join(allowed)
        return f"{_topk(launch)} with page size {page_size} runs on {backends} only, got attention backend {backend}"

    return reason


def _rejection_sampling(launch: Launch) -> str | None:
    if launch.tree and launch.flag("speculative-use-rejection-sampling"):
        return f"rejection sampling has top-k 1 only, got {_topk(launch)}"
    return None


def _overwritten(flag: str, *names: str) -> Callable[[Launch], str | None]:
    """A variable that SGLang sets itself could never take effect."""

    def reason(launch: Launch) -> str | None:
        swept = [name for name in names if name in launch.env]
        if not swept or not launch.flag(flag):
            return None
        return f"--{flag} overwrites {', '.join(swept)}: the value asked for could never take effect"

    return reason


LIMITS: tuple[Limit, ...] = (
    Limit(_trtllm_mha),
    Limit(_flashmla),
    Limit(_paged_tree("flashinfer", "fa3", "triton")),
    Limit(_rejection_sampling),
    Limit(_overwritten("enable-deterministic-inference", "NCCL_ALGO")),
    Limit(
        _overwritten("enable-deterministic-inference", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
        first=supported("0.5.18"),
    ),
    Limit(_overwritten("enable-symm-mem", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")),
    Limit(_overwritten("enable-nccl-nvls", "NCCL_NVLS_ENABLE")),
)
