"""Secrets by the names of their variables and arguments: the child's environment has the values, and nothing else has.

`HF_TOKEN` becomes `${HF_TOKEN}`, which a shell fills in. Names are judged, not values: a value may be anything.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

_ALWAYS = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|COOKIE|BEARER|(?:API|ACCESS|PRIVATE|SIGNING|ENCRYPTION)_?KEY"
    r"|(?:AUTH|ACCESS|API|HF|HUB|SESSION|REFRESH|GITHUB|GITLAB|WANDB)_?TOKENS?(?:_|$)"
)
_IN_A_VARIABLE = re.compile(r"TOKEN(?!S?IZ|S(?:_|$)|_MAP)|_(?:PASS|PWD|AUTH|PAT|KEY)$")
"""Also these in the name of a variable, unless it is a setting of an engine (`SGLANG_INIT_NEW_TOKEN_RATIO`)."""
_SETTINGS = ("SGLANG_", "SGL_", "VLLM_", "NCCL_", "TORCH", "CUDA_", "SPECSWEEP_")
_USERINFO = re.compile(r"(?<=://)[^/\s\"'@]*(?:@[^/\s\"'@]*)*@")
"""User and password of a URL, with the sign behind them."""
_ASSIGNMENT = re.compile(r"(?P<head>(?:--?[\w-]+=)?)(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
_OPTION = re.compile(r"--?(?P<name>[A-Za-z][\w-]*)(?:=(?P<value>.*))?", re.DOTALL)
_REFERENCE = re.compile(r"(?P<head>(?:--?[\w-]+=)?)(?P<name>[A-Za-z_][A-Za-z0-9_]*)=\$\{(?P=name)\}")
_LEAST_LETTERS = 6
"""Shorter values are not looked for in free text: they are words of it."""


def is_secret(name: str) -> bool:
    """Whether an environment variable of this name holds a secret."""
    upper = name.upper()
    return bool(_ALWAYS.search(upper) or (not upper.startswith(_SETTINGS) and _IN_A_VARIABLE.search(upper)))


def is_secret_argument(name: str) -> bool:
    """Whether a command line's argument of this name holds a secret: `api-key`, but not `speculative-token-map`."""
    upper = name.lstrip("-").upper().replace("-", "_")
    return bool(_ALWAYS.search(upper)) or upper in ("TOKEN", "PASS", "PWD", "AUTH")


def reference(name: str) -> str:
    """What stands for the value of a secret variable."""
    return f"${{{name}}}"


def redacted(name: str, value: str) -> str:
    """The value of a variable as others may read it."""
    return reference(name) if is_secret(name) and value else without_userinfo(value)


def redacted_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables as others may read them."""
    return {name: redacted(name, value) for name, value in variables.items()}


def without_userinfo(text: str) -> str:
    """`http://user:password@proxy` as `http://***@proxy`, wherever it stands in `text`."""
    return _USERINFO.sub("***@", text)


def redacted_words(words: Iterable[str]) -> tuple[str, ...]:
    """A command's words as others may read them: without what follows `-e HF_TOKEN=`, `--password`, `--api-key=`."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        if hide_next:
            shown.append("***")
            hide_next = False
            continue
        shown.append(_redacted_word(word))
        option = _OPTION.fullmatch(word)
        hide_next = option is not None and option["value"] is None and is_secret_argument(option["name"])
    return tuple(shown)


def _redacted_word(word: str) -> str:
    assignment, option = _ASSIGNMENT.fullmatch(word), _OPTION.fullmatch(word)
    if assignment is not None and assignment["value"] and is_secret(assignment["name"]):
        return f"{assignment['head']}{assignment['name']}={reference(assignment['name'])}"
    if option is not None and option["value"] and is_secret_argument(option["name"]):
        return f"{word[: word.index('=')]}=***"
    return without_userinfo(word)


def shell_line(words: Iterable[str]) -> str:
    """The words as a line for a shell; each is quoted, but `HF_TOKEN=${HF_TOKEN}` is filled in by the shell."""
    return " ".join(map(shell_word, words))


def shell_word(word: str) -> str:
    """One word for a shell."""
    found = _REFERENCE.fullmatch(word)
    return shlex.quote(word) if found is None else f'{found["head"]}{found["name"]}="{reference(found["name"])}"'


def without_values(text: str, secrets: Sequence[str]) -> str:
    """Free text (an error, a line of a log) without the given values."""
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _LEAST_LETTERS:
            text = text.replace(value, "***")
    return without_userinfo(text)
