"""Spec text as others may read it: values of secrets replaced by references to their variables."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from sweeps.redaction import is_secret, is_secret_argument, redacted_words, reference, without_userinfo
from sweeps.spec.yaml_text import SpecError, children, parse

_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
"""Anchor and tag in front of a value; they stay."""


def redacted_text(text: str) -> str:
    """Spec text without the values of secrets; text without any is returned as it is.

    Values of keys with a secret's name, secrets among the words of a list (`engine.launcher`), and users and passwords
    of URLs. Comments keep what they say, but for the last.
    """
    try:
        _, root = parse(text, source="spec")
        edits = sorted({} if root is None else dict(_edits(root)).items(), reverse=True)
    except SpecError:
        return without_userinfo(text)
    shown = text
    for (start, end), value in edits:
        old = shown[start:end]
        head, tail = _PROPERTIES.match(old), old[len(old.rstrip()) :]
        assert head is not None
        quoted = yaml.safe_dump(value, default_style='"', width=10**9).strip()
        shown = f"{shown[:start]}{head[0]}{quoted}{tail}{shown[end:]}"
    return without_userinfo(shown)


def _edits(root: yaml.Node) -> Iterator[tuple[tuple[int, int], str]]:
    """Places of scalars in the text, and what replaces each."""
    seen: set[int] = set()
    ahead = [root]
    while ahead:
        node = ahead.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        ahead.extend(children(node))
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                if is_secret(str(name.value)) or is_secret_argument(str(name.value)):
                    yield from ((_place(each), reference(name.value)) for each in _scalars(value))
        elif isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.ScalarNode) for each in node.value):
            words = [each.value for each in node.value]
            for each, shown in zip(node.value, redacted_words(words), strict=True):
                if shown != each.value and shown != without_userinfo(each.value):
                    yield _place(each), shown


def _scalars(node: yaml.Node) -> list[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        return [node] if node.value else []
    inside = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
    return [found for child in inside for found in _scalars(child)]


def _place(node: yaml.ScalarNode) -> tuple[int, int]:
    return node.start_mark.index, node.end_mark.index
