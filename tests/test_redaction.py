"""Secrets are known by the names of their variables, and nothing but the child's environment has their values."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.redaction import (
    is_secret,
    is_secret_argument,
    redacted_variables,
    redacted_words,
    shell_line,
    without_userinfo,
    without_values,
)
from sweeps.spec.hidden import redacted_text
from sweeps.spec.yaml_text import SpecError, parse


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN",
        "MY_PASSWORD",
        "DB_CREDENTIALS",
        "GITHUB_TOKEN",
        "MYTOKEN",
        "openai_key",
        "SSH_PRIVATE_KEY",
        "SGLANG_API_KEY",
        "RAY_AUTH_TOKEN",
        "db_passwd",
        "TOKEN",
        "COMETAPIKEY",
        "NPM_CONFIG__AUTH",
        "token_of_ci",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert redacted_variables({name: "x"}) == {name: f"${{{name}}}"}


@pytest.mark.parametrize(
    "name",
    [
        "PWD",
        "OLDPWD",
        "SSH_AUTH_SOCK",
        "TOKENIZERS_PARALLELISM",
        "SGLANG_INIT_NEW_TOKEN_RATIO",
        "NCCL_IB_PKEY",
        "MAX_TOKENS",
        "RAY_AUTH_MODE",
        "SGLANG_USE_AITER_FP8_PER_TOKEN",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE",
        "SGLANG_PATCH_TOKENIZER",
        "KEYBOARD",
        "NCCL_PROTO",
    ],
)
def test_names_of_settings(name: str) -> None:
    assert not is_secret(name)
    assert redacted_variables({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("api-key", True),
        ("admin_api_key", True),
        ("ssl-keyfile-password", True),
        ("token", True),
        ("max-total-tokens", False),
        ("speculative-token-map", False),
        ("tokenizer-path", False),
        ("speculative-num-draft-tokens", False),
    ],
)
def test_names_of_arguments(name: str, *, secret: bool) -> None:
    assert is_secret_argument(name) is secret


def test_words_of_a_command_hide_their_values() -> None:
    words = [
        "docker",
        "-e",
        "HF_TOKEN=abc",
        "--env=HF_TOKEN=abc",
        "--password",
        "abc",
        "--api-key=abc",
        "http://u:abc@h",
    ]
    shown = redacted_words([*words, "--x", "y", "A=b"])
    assert "abc" not in " ".join(shown)
    assert shown[-3:] == ("--x", "y", "A=b")
    assert shown[2] == "HF_TOKEN=${HF_TOKEN}"


def test_a_shell_fills_in_the_value_and_nothing_else() -> None:
    line = shell_line(["env", "HF_TOKEN=${HF_TOKEN}", "A=${B}", "sh", "-c", 'printf "%s %s" "$HF_TOKEN" "$A"'])
    ran = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True, env={"HF_TOKEN": "a b$c"})
    assert ran.stdout == "a b$c ${B}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pw@proxy:1/a", "http://***@proxy:1/a"),
        ("x https://token@h y http://h/a@b", "x https://***@h y http://h/a@b"),
        ("http://u:p@ss@h", "http://***@h"),
        ("user@host", "user@host"),
    ],
)
def test_urls_lose_user_and_password(text: str, shown: str) -> None:
    assert without_userinfo(text) == shown


def test_free_text_loses_values_that_are_long_enough_to_be_told_from_words() -> None:
    assert without_values("login with hf_abcdef failed at 1", ["hf_abcdef", "1"]) == "login with *** failed at 1"


SPEC = """engine:   # http://u:marker@h
  env: {HF_TOKEN: &a marker, OTHER: *a, http_proxy: "http://u:marker@h:1", N: "1"}
  launcher: [docker, run, -e, HF_TOKEN=marker, --password, marker]
  args: {api-key: 'marker --x', n: 1}
more:
  MY_PASSWORD: |
    marker
    more
  B_TOKEN: [marker, "marker"]
  C_TOKEN: !!str marker
  D_TOKEN: "mar\\
    ker"
  E_TOKEN:
z: 1
"""


def test_spec_text_loses_its_secrets_and_nothing_else() -> None:
    shown = redacted_text(SPEC)
    assert "mark" not in shown
    values, _ = parse(shown, source="s")
    assert values["engine"]["env"] == {
        "HF_TOKEN": "${HF_TOKEN}",
        "OTHER": "${HF_TOKEN}",
        "http_proxy": "http://***@h:1",
        "N": "1",
    }
    assert values["engine"]["launcher"] == ["docker", "run", "-e", "HF_TOKEN=${HF_TOKEN}", "--password", "***"]
    assert values["more"]["B_TOKEN"] == ["${B_TOKEN}", "${B_TOKEN}"]
    assert values["more"]["E_TOKEN"] is None
    assert values["z"] == 1
    assert redacted_text(shown) == shown


def test_text_without_secrets_stays_as_it_is() -> None:
    text = "a: 1  # a comment\nb: [x, 'y']\n"
    assert redacted_text(text) == text


@given(st.text(alphabet="abcxyz'\"#:{}[]&*!|>-\n\t \\$", max_size=30))
def test_no_form_of_a_value_stays(value: str) -> None:
    text = f"HF_TOKEN: {value}\nz: 1\n"
    try:
        before, _ = parse(text, source="s")
    except SpecError:
        return
    shown = redacted_text(text)
    if isinstance(before, dict) and isinstance(before.get("HF_TOKEN"), str) and before["HF_TOKEN"]:
        after, _ = parse(shown, source="s")
        assert after == {**before, "HF_TOKEN": "${HF_TOKEN}"}
