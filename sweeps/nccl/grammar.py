"""NCCL variable sets: grammar, rules, and what a set can and cannot change in decode.

Rules follow NCCL's source (`parseList` and the tuning model in src/graph/tuning.cc, 2.30.7) for one node whose GPUs all
take part: what NCCL would accept and silently ignore, or only refuse at the first collective, is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sweeps import SpecsweepError
from sweeps.choices import choose, nearest
from sweeps.nccl.catalogue import CATALOGUE

FUNCTIONS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
"""Both in the order of NCCL's own numbers, which versions before 2.24 print."""
ELEMENTS: Mapping[str, Sequence[str]] = {"NCCL_ALGO": ALGORITHMS, "NCCL_PROTO": PROTOCOLS}

SGLANG_DEFAULTS: Mapping[str, str] = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_GRAPH_REGISTER": "0",
}
"""Variables that SGLang sets if they are unset (NCCL_GRAPH_REGISTER from 0.5.20): `unset` in a sweep means this."""

_ALL = frozenset(PROTOCOLS)
_SIMPLE = frozenset({"Simple"})
_SWITCHED = {"NVLS": _SIMPLE, "CollNetDirect": _SIMPLE}
_ON_ONE_NODE: Mapping[str, Mapping[str, frozenset[str]]] = {
    "AllReduce": {"Ring": _ALL, "Tree": _ALL, "CollNetChain": _SIMPLE, **_SWITCHED},
    "AllGather": {"Ring": _ALL, **_SWITCHED},
    "ReduceScatter": {"Ring": _ALL, **_SWITCHED},
    "Broadcast": {"Ring": _ALL},
    "Reduce": {"Ring": _ALL},
}
"""Protocols by function and algorithm. NVLSTree needs several nodes and PAT one GPU per node: neither is here."""


class NcclSetError(SpecsweepError, ValueError):
    """A list of NCCL_ALGO or NCCL_PROTO that NCCL refuses."""


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One `function:list` of NCCL_ALGO or NCCL_PROTO."""

    function: str | None
    """None: every function (the first entry only)."""
    negated: bool
    elements: tuple[str, ...]


def parse_list(value: str, elements: Sequence[str]) -> tuple[ListEntry, ...]:
    """Read `list[;function:list]*`; names in any case, `^` excludes. Raises NcclSetError.

    As in NCCL, a name has exactly one spelling: `NVLS_TREE`, ` ring` with a space and the number `1` are refused.
    Stricter than NCCL in three points: NCCL skips empty names and entries, takes a name twice, and ignores what follows
    a second colon. All three are refused here.
    """
    return tuple(_parse_entry(text, position, elements) for position, text in enumerate(value.split(";")))


def format_list(entries: Sequence[ListEntry]) -> str:
    """The canonical text of a list: names in NCCL's own spelling."""
    return ";".join(
        f"{entry.function.lower()}:{_format_names(entry)}" if entry.function else _format_names(entry)
        for entry in entries
    )


def variable_problem(name: str, value: str, *, allow_unknown: bool = False) -> str | None:
    """What is wrong with one variable by itself, or None."""
    variable = CATALOGUE.get(name)
    if variable is None or variable.gone:
        if allow_unknown:
            return None
        guess = nearest(name, (known.name for known in CATALOGUE.values() if not known.gone))
        why = f"no longer read by NCCL (last by {variable.until})" if variable else "not an NCCL variable"
        hint = f"; did you mean {guess}?" if guess else ""
        return f"{why}, value {value!r}{hint} (allow_unknown_nccl: true sweeps it on purpose)"
    if name in ELEMENTS:
        try:
            parse_list(value, ELEMENTS[name])
        except NcclSetError as error:
            return str(error)
        return None
    wanted = variable.problem(value)
    if wanted is None:
        return None
    guess = nearest(value, variable.values.split("|"))
    return f"{wanted}, got {value!r}{f'; did you mean {guess}?' if guess else ''}"


def set_problems(variables: Mapping[str, str], *, allow_unknown: bool = False) -> Iterator[tuple[str, str]]:
    """The variable and the message of everything wrong with a set: each variable, then what they mean together."""
    wrong = {
        name: problem
        for name, value in variables.items()
        if (problem := variable_problem(name, value, allow_unknown=allow_unknown))
    }
    yield from wrong.items()
    sound = {name: value for name, value in variables.items() if name not in wrong}
    yield from _range_problems(sound)
    yield from _candidate_problems(sound)


def enabled(name: str, value: str, *, function: str) -> frozenset[str] | None:
    """What `value` of NCCL_ALGO or NCCL_PROTO (`name`) leaves on for one function; None if NCCL refuses the value."""
    try:
        return _enabled(value, ELEMENTS[name])[function]
    except NcclSetError:
        return None


def candidates(variables: Mapping[str, str]) -> dict[str, frozenset[tuple[str, str]]]:
    """(algorithm, protocol) pairs that a legal set leaves to NCCL on one node, by function."""
    algorithms = _enabled(variables.get("NCCL_ALGO"), ALGORITHMS)
    protocols = _enabled(variables.get("NCCL_PROTO"), PROTOCOLS)
    return {
        function: frozenset(
            (algorithm, protocol)
            for algorithm, possible in _ON_ONE_NODE[function].items()
            if algorithm in algorithms[function]
            for protocol in possible & protocols[function]
        )
        for function in FUNCTIONS
    }


def canonical(name: str, value: str) -> str:
    """The value in one spelling: equal for values that NCCL reads alike."""
    return format_list(parse_list(value, ELEMENTS[name])) if name in ELEMENTS else value


def inert_at_decode(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of a set that cannot change a decode-size all-reduce at batch 1 on one node, each with the reason."""
    reasons = ((name, _inert(name, value, variables)) for name, value in variables.items())
    return {name: reason for name, reason in reasons if reason}


def cautions(variables: Mapping[str, str]) -> dict[str, str]:
    """Legal settings of a set that have hung, corrupted or slowed real systems, each with what to know."""
    found = {}
    if variables.get("NCCL_P2P_LEVEL") in {"SYS", "PHB"}:
        found["NCCL_P2P_LEVEL"] = "with IOMMU or ACS on, the first collective can hang and the GPUs need a reset"
    if "NCCL_PROTO" in variables and _names(variables["NCCL_PROTO"], "LL128"):
        found["NCCL_PROTO"] = "naming LL128 skips NCCL's own check that the path keeps 128-byte stores whole"
    if variables.get("NCCL_GRAPH_REGISTER") == "1":
        found["NCCL_GRAPH_REGISTER"] = "the replay of captured collectives can hang; SGLang sets 0"
    if variables.get("NCCL_NVLS_ENABLE") in {"1", "2"}:
        found["NCCL_NVLS_ENABLE"] = "needs NVSwitch; SGLang sets 0"
    if variables.get("NCCL_P2P_DISABLE") == variables.get("NCCL_SHM_DISABLE") == "1":
        found["NCCL_SHM_DISABLE"] = "with P2P off too, GPUs of one node talk through network sockets"
    return found


def _format_names(entry: ListEntry) -> str:
    return ("^" if entry.negated else "") + ",".join(entry.elements)


def _parse_entry(text: str, position: int, elements: Sequence[str]) -> ListEntry:
    prefix, colon, rest = text.partition(":")
    names = rest if colon else prefix
    function = _spelled(prefix, FUNCTIONS, "function") if colon else None
    if function is None and position > 0:
        raise NcclSetError(f"only the first entry may lack a function, got {text!r}: write allreduce:{text or 'NAME'}")
    negated = names.startswith("^")
    listed = tuple(_spelled(name, elements, "name") for name in names.removeprefix("^").split(","))
    if len(set(listed)) != len(listed):
        raise NcclSetError(f"a name is there twice in {text!r}")
    return ListEntry(function, negated, listed)


def _spelled(name: str, choices: Sequence[str], what: str) -> str:
    for choice in choices:
        if choice.casefold() == name.casefold():
            return choice
    raise NcclSetError(f"no {what} {name!r}; {choose(name, choices)}")


def _enabled(value: str | None, elements: Sequence[str]) -> dict[str, frozenset[str]]:
    enabled = dict.fromkeys(FUNCTIONS, frozenset(elements))
    for entry in parse_list(value, elements) if value else ():
        kept = frozenset(elements) - set(entry.elements) if entry.negated else frozenset(entry.elements)
        enabled.update({function: kept for function in FUNCTIONS if entry.function in {None, function}})
    return enabled


def _names(value: str, element: str) -> bool:
    return any(not entry.negated and element in entry.elements for entry in parse_list(value, PROTOCOLS))


def _range_problems(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for low, high in (("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"), ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS")):
        if low in variables and high in variables and int(variables[low]) > int(variables[high]):
            yield low, f"wanted at most {high} ({variables[high]}), got {variables[low]!r}: NCCL would take one of them"


def _candidate_problems(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if not ELEMENTS.keys() & variables.keys():
        return
    left = candidates(variables)
    for function in FUNCTIONS:
        if left[function]:
            continue
        key = "NCCL_ALGO" if "NCCL_ALGO" in variables else "NCCL_PROTO"
        has = ", ".join(f"{name} ({'/'.join(sorted(possible))})" for name, possible in _ON_ONE_NODE[function].items())
        settings = " with ".join(f"{name}={variables[name]}" for name in ELEMENTS if name in variables)
        hint = _prefix_hint(variables, left)
        yield key, f"{settings} leaves {function} nothing to run on one node; it has {has}{hint}"
        return


def _prefix_hint(variables: Mapping[str, str], left: Mapping[str, frozenset[tuple[str, str]]]) -> str:
    """A list that suits the all-reduce alone should say so."""
    plain = variables.get("NCCL_ALGO", "")
    return f"; write allreduce:{plain.lower()}" if left["AllReduce"] and plain and ":" not in plain else ""


def _inert(name: str, value: str, variables: Mapping[str, str]) -> str | None:
    variable = CATALOGUE.get(name)
    if variable is None or variable.gone:
        return "NCCL does not read it"
    if value == SGLANG_DEFAULTS.get(name, variable.default):
        return "SGLang sets the same" if name in SGLANG_DEFAULTS else "NCCL's default"
    if variable.decode == "none":
        return variable.note or "nothing to act on at these sizes"
    if name == "NCCL_P2P_LEVEL" and variables.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE wins"
    if name in {"NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"} and int(value) >= _DECODE_CHANNELS:
        return f"batch-1 messages use at most {_DECODE_CHANNELS} channels"
    if name in {"NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS"} and candidates(variables)["AllReduce"] <= {("Ring", "LL")}:
        return "Ring with LL takes its channels from the message size"
    return None


_DECODE_CHANNELS = 8
"""Most channels that any algorithm takes up to 130 KB in communicators of 8 channels (NCCL 2.30.7)."""
