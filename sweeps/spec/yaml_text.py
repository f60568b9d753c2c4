"""YAML text that somebody else may have written, as values: bounded in size, depth and what its aliases repeat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from sweeps import SpecsweepError
from sweeps.foreign_text import one_line

MOST_BYTES = 256 << 10
"""A spec of this size has thousands of lines; the parser takes seconds for it."""
_MOST_DEPTH = 40
_MOST_NODES = 50_000
"""Values, each counted as often as aliases repeat it."""


class SpecError(SpecsweepError, ValueError):
    """A spec that cannot be run as written. Each line names file, key, value and the choices."""


def read_text(path: Path) -> str:
    """The text of a YAML file. Raises SpecError, without reading it if it is too large or not a plain file."""
    try:
        if path.exists() and not path.is_file():
            raise SpecError(f"{path}: wanted the YAML of a sweep, but it is not a plain file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise SpecError(f"{path}: wanted at most {MOST_BYTES >> 10} KiB of YAML, got more")
        return content.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: wanted the YAML of a sweep, but it cannot be read: {error}") from error


def parse(text: str, *, source: str) -> tuple[Any, yaml.Node | None]:
    """The values of YAML text, and its nodes with their marks. Merge keys are merged in the values alone.

    Raises SpecError for what is not YAML, and for text, nesting or aliases beyond the bounds.
    """
    if len(text) > MOST_BYTES:
        raise SpecError(f"{source}: wanted at most {MOST_BYTES >> 10} KiB of YAML, got {len(text) >> 10} KiB")
    try:
        _check_depth(text, source)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _check_nodes(root, source)
        return yaml.safe_load(text), root
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        why = one_line(" ".join(str(getattr(error, "problem", None) or error).split()))
        raise SpecError(f"{where}: not valid YAML: {why}") from error
    except SpecError:
        raise
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:
        # what PyYAML's constructors make of `2026-99-99`, of a number of 5,000 digits, of `!!timestamp x`
        why = one_line(" ".join(str(error).split()))
        raise SpecError(f"{source}: not valid YAML: a value cannot be read ({type(error).__name__}: {why})") from error


def _check_depth(text: str, source: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MOST_DEPTH:
                line = event.start_mark.line + 1
                raise SpecError(f"{source}:{line}: wanted at most {_MOST_DEPTH} levels of nesting, got more")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_nodes(root: yaml.Node, source: str) -> None:
    """Raise SpecError if aliases repeat a value inside itself, or too many values. Each node is looked at once."""
    counts: dict[int, int] = {}
    open_nodes: set[int] = set()
    stack: list[tuple[yaml.Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            open_nodes.discard(id(node))
            counts[id(node)] = 1 + sum(counts[id(child)] for child in children(node))
            if counts[id(node)] > _MOST_NODES:
                line = node.start_mark.line + 1
                raise SpecError(f"{source}:{line}: wanted at most {_MOST_NODES} values, but aliases repeat more")
        elif id(node) in open_nodes:
            raise SpecError(f"{source}:{node.start_mark.line + 1}: an alias repeats a value inside itself")
        elif id(node) not in counts:
            open_nodes.add(id(node))
            stack.append((node, True))
            stack.extend((child, False) for child in children(node))


def children(node: yaml.Node) -> Iterator[yaml.Node]:
    """The nodes right inside a node: items, or keys and values."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield name
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
