from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sweeps.engines.sglang.limits import LIMITS, check_limits
from sweeps.engines.sglang.versions import SUPPORTED, release_of
from sweeps.spec.model import Scalar
from sweeps.spec.space import Configuration


def configuration(eagle_topk: int | None = 1, **fields: Any) -> Configuration:
    speculates = eagle_topk is not None
    given: dict[str, Any] = {
        "num_steps": 3 if speculates else 0,
        "eagle_topk": eagle_topk,
        "num_draft_tokens": 8 if speculates else None,
        "drafter": "d" if speculates else None,
        "nccl_set": "default",
        "nccl_env": (),
    }
    return Configuration(**{**given, **fields})


TREE = configuration(4)
CHAIN = configuration(1)


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize(
    ("one", "args", "reason"),
    [
        (TREE, {"attention-backend": "trtllm_mha"}, "trtllm_mha speculates with top-k 1 only, got top-k 4"),
        (TREE, {"attention-backend": "triton", "decode-attention-backend": "trtllm_mha"}, "trtllm_mha"),
        (TREE, {"attention-backend": "flashmla"}, "flashmla"),
        (TREE, {"attention-backend": "trtllm_mla"}, "top-k 4 with page size 64 runs on flashinfer, fa3, triton only"),
        (TREE, {"attention-backend": "cutlass_mla"}, "page size 128"),
        (TREE, {"attention-backend": "aiter", "page-size": 16}, "page size 16"),
        (TREE, {"speculative-use-rejection-sampling": True}, "rejection sampling"),
        (CHAIN, {"attention-backend": "trtllm_mha"}, None),
        (CHAIN, {"attention-backend": "trtllm_mla", "page-size": 32}, None),
        (CHAIN, {"speculative-use-rejection-sampling": True}, None),
        (TREE, {"attention-backend": "aiter", "page-size": 1}, None),
        (TREE, {"attention-backend": "aiter"}, None),
        (TREE, {"attention-backend": "triton", "page-size": 64}, None),
        (TREE, {"page-size": 64}, None),
        (TREE, {}, None),
        (configuration(None), {"attention-backend": "trtllm_mha"}, None),
    ],
)
def test_supported_versions(version: str, one: Configuration, args: Mapping[str, Scalar], reason: str | None) -> None:
    found = check_limits(one, args, version)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(f"SGLang {version}: ")
        assert reason in found


@pytest.mark.parametrize("version", [None, "", "main", "0.5.15", "0.6.0", "0.5.24", "1.0.0", "0.0.0.dev0"])
def test_an_unknown_version_refuses_nothing(version: str | None) -> None:
    args: dict[str, Scalar] = {
        "attention-backend": "trtllm_mha",
        "page-size": 64,
        "speculative-use-rejection-sampling": True,
    }
    assert check_limits(TREE, args, version, engine_env={"SGLANG_ENABLE_SPEC_V2": "1"}) is None


@pytest.mark.parametrize(
    ("version", "flag", "name", "refused"),
    [
        ("0.5.16", "enable-deterministic-inference", "NCCL_ALGO", True),
        ("0.5.17", "enable-deterministic-inference", "NCCL_MAX_NCHANNELS", False),
        ("0.5.18", "enable-deterministic-inference", "NCCL_MAX_NCHANNELS", True),
        ("0.5.21", "enable-symm-mem", "NCCL_CUMEM_ENABLE", True),
        ("0.5.21", "enable-nccl-nvls", "NCCL_NVLS_ENABLE", True),
        ("0.5.21", "enable-nccl-nvls", "NCCL_CUMEM_ENABLE", False),
    ],
)
def test_variables_that_a_flag_overwrites(version: str, flag: str, name: str, refused: bool) -> None:
    swept = configuration(None, nccl_env=((name, "1"),))
    found = check_limits(swept, {flag: True}, version)
    assert (found is not None) is refused
    assert found is None or (name in found and flag in found)
    assert check_limits(swept, {flag: False}, version) is None
    searched = configuration(None, nccl_env=((name, "1"),), args=((flag, True),))
    assert (check_limits(searched, {}, version) is not None) is refused


def test_every_limit_holds_in_a_supported_release() -> None:
    releases = [release_of(version) for version in SUPPORTED]
    assert all(limit.first in releases and limit.last in releases and limit.first <= limit.last for limit in LIMITS)
