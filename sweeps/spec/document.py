"""Spec text as a document, and what is wrong with one as lines that a person can act on.

Knows YAML and pydantic, not what a sweep is: `spec` gives the shape and `checks` the meaning.
"""

from __future__ import annotations

import dataclasses
import reprlib
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from sweeps.choices import choose
from sweeps.foreign_text import one_line, unprintable
from sweeps.redaction import is_secret
from sweeps.spec.yaml_text import SpecError as SpecError
from sweeps.spec.yaml_text import parse

Key = tuple[str | int, ...]

_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a spec: its place, what was wanted, and what came."""

    key: Key
    message: str


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML mapping and the line of each of its keys."""

    values: Mapping[str, Any]
    lines: Mapping[Key, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """Keys written twice, which YAML itself would let pass."""


def read_document(text: str, *, source: str) -> Document:
    """Parse spec text. Raises SpecError if it is not a YAML mapping, or too large, too deep or a bomb of aliases."""
    values, root = parse(text, source=source)
    if not isinstance(values, dict):
        raise SpecError(f"{source}: wanted a mapping with the keys of a sweep, got {_show(values)}")
    lines: dict[Key, int] = {}
    return Document(values, problems=(*_walk(root, lines), *_unprintable(values, ())), lines=lines)


def _unprintable(value: object, key: Key) -> Iterator[Problem]:
    """Names that are not printable, and values that hold more than line breaks and tabs beside what is printable."""
    if isinstance(value, str) and (found := unprintable(value, allowed="\n\t")) is not None:
        yield Problem(key, f"wanted printable text, got the character {found}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _unprintable(part, (*key, index))
    elif isinstance(value, dict):
        for name, part in value.items():
            child = (*key, name if isinstance(name, str | int) else str(name))
            if isinstance(name, str) and (found := unprintable(name)) is not None:
                yield Problem(child, f"wanted a printable name, got the character {found}")
            yield from _unprintable(part, child)


def refuse(problems: Iterable[Problem], *, source: str, lines: Mapping[Key, int]) -> None:
    """Raise SpecError with one line per problem, in the order of the file; nothing if there is none."""
    numbered = [(_line(problem.key, lines), problem) for problem in problems]
    if numbered:
        numbered.sort(key=lambda pair: pair[0] or 0)
        told = (
            f"{source}{f':{line}' if line else ''}: {one_line(f'{dotted(problem.key)}: {problem.message}')}"
            for line, problem in numbered
        )
        raise SpecError("\n".join(told))


def validation_problems(error: ValidationError, model: type) -> list[Problem]:
    """Pydantic's account of a document as problems; `model` is the dataclass that it should have been."""
    grouped: dict[Key, list[Any]] = {}
    for detail in error.errors(include_url=False):
        grouped.setdefault(_own_key(detail["loc"], model), []).append(detail)
    return [Problem(key, _explain(key, details, model)) for key, details in grouped.items()]


def dotted(key: Key) -> str:
    """`search.num_steps[1]`, as in messages."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _walk(root: yaml.Node | None, lines: dict[Key, int]) -> Iterator[Problem]:
    """Fill `lines`; yields the keys that are written twice. What an alias repeats is walked where it is written."""
    walked: set[int] = set()
    ahead: list[tuple[yaml.Node | None, Key]] = [(root, ())]
    while ahead:
        node, key = ahead.pop()
        if id(node) in walked:
            continue
        walked.add(id(node))
        for name, marked, value in _children(node):
            child, line = (*key, name), marked.start_mark.line + 1
            if child in lines and marked.tag != _MERGE:
                yield Problem(child, f"written twice, again on line {line}; one of them would be lost")
            lines.setdefault(child, line)
            ahead.append((value, child))


def _children(node: yaml.Node | None) -> Iterator[tuple[str | int, yaml.Node, yaml.Node]]:
    """Name, the node that carries its line, and value."""
    if isinstance(node, yaml.MappingNode):
        yield from ((str(name.value), name, value) for name, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from ((index, value, value) for index, value in enumerate(node.value))


def _line(key: Key, lines: Mapping[Key, int]) -> int | None:
    return next((lines[key[:end]] for end in range(len(key), 0, -1) if key[:end] in lines), None)


def _own_key(loc: tuple[Any, ...], model: type) -> Key:
    """The key in the document: pydantic appends the name of the tried type if a value may have several."""
    key, hint = _follow(loc, model)
    return key if _is_scalar_union(hint) else tuple(loc)


def _follow(loc: tuple[Any, ...], model: type) -> tuple[Key, Any]:
    """Walk from `model` along `loc` as far as the types go; gives the part walked and the type found there."""
    hint: Any = model
    for depth, part in enumerate(loc):
        following = _step(_bare(hint), part)
        if following is None:
            return tuple(loc[:depth]), _bare(hint)
        hint = following
    return tuple(loc), _bare(hint)


def _step(hint: Any, part: Hashable) -> Any:
    if dataclasses.is_dataclass(hint):
        return typing.get_type_hints(hint, include_extras=True).get(str(part))
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is tuple:
        return arguments[0]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return arguments[1]
    return None


def _bare(hint: Any) -> Any:
    """Without Annotated and without `| None`."""
    if hasattr(hint, "__metadata__"):
        return _bare(hint.__origin__)
    arguments = [argument for argument in typing.get_args(hint) if argument is not type(None)]
    if type(None) in typing.get_args(hint) and len(arguments) == 1:
        return _bare(arguments[0])
    return hint


def _is_scalar_union(hint: Any) -> bool:
    return set(typing.get_args(hint)) >= {bool, int, float, str}


def _explain(key: Key, details: list[Any], model: type) -> str:
    detail = details[0]
    value = "a secret" if is_secret(str(key[-1])) else detail["input"]
    match detail["type"]:
        case "unexpected_keyword_argument":
            _, section = _follow(key[:-1], model)
            known = [item.name for item in dataclasses.fields(section)]
            return f"unknown key, value {_show(value)}; {choose(str(key[-1]), known)}"
        case "missing":
            return f"wanted {_wanted(key, model)}, but the key is absent"
        case "literal_error":
            choices = [str(choice) for choice in typing.get_args(_follow(key, model)[1])]
            return f"got {_show(value)}; {choose(str(value), choices)}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"wanted {detail['msg'].removeprefix('Input should be ')}, got {_show(value)}"
        case "value_error":
            return f"{detail['msg'].removeprefix('Value error, ')}, got {_show(value)}"
        case "tuple_type":
            hint = "" if isinstance(value, dict) else f": write [{value}]"
            return f"wanted a list, got {_show(value)}{hint}"
        case _:
            return f"wanted {_wanted(key, model)}, got {_show(value)}"


_PLAIN = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}


def _wanted(key: Key, model: type) -> str:
    _, hint = _follow(key, model)
    if _is_scalar_union(hint):
        return "true, false, a number or text"
    if dataclasses.is_dataclass(hint):
        return f"a mapping with the keys {', '.join(item.name for item in dataclasses.fields(hint))}"
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    return _PLAIN.get(hint, "a mapping")


def _show(value: object) -> str:
    text = "nothing" if value is None else _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = 8
