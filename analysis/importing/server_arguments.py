"""What an SGLang server's log says of its start: resolved arguments, seconds, and warnings that change an argument."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analysis.importing.records import Drafting, Event

_LINE = re.compile(r"server_args\s*=\s*(?:ServerArgs\(|\{)(?P<rest>.*)$")
_ITEM = re.compile(
    r"(?:^|[,({\s])'?(?P<name>[a-z][a-z0-9_]*)'?\s*[=:]\s*(?P<value>'[^']*'|\"[^\"]*\"|[-+\w.]+)", re.ASCII
)
_TOLD = (
    "attention_backend",
    "decode_attention_backend",
    "disable_cuda_graph",
    "disable_custom_all_reduce",
    "disable_overlap_schedule",
    "dp_size",
    "dtype",
    "enable_dp_attention",
    "kv_cache_dtype",
    "max_running_requests",
    "mem_fraction_static",
    "moe_runner_backend",
    "page_size",
    "pp_size",
    "quantization",
    "speculative_algorithm",
    "tp_size",
)
"""What tells one configuration from another; the drafting is kept apart."""
_VERSION = re.compile(r"(?:sglang[ _-]?(?:version)?[ =:v]*|\bversion=')(?P<version>\d+\.\d+\.\d+[\w.]*)", re.IGNORECASE)
_SECONDS: Sequence[tuple[str, re.Pattern[str]]] = (
    ("weight_load", re.compile(r"Load weight end\b.*?\belapsed[=:]\s*(?P<s>\d{1,9}(?:\.\d{1,9})?)\s*s")),
    (
        "capture",
        re.compile(r"Capture .*?graphs? end\b.*?\belapsed[=:]\s*(?P<s>\d{1,9}(?:\.\d{1,9})?)\s*s", re.IGNORECASE),
    ),
)
_CHANGES = re.compile(
    r"\b(?:is reset to|are reset to|is set to|overrid(?:e|es|den|ing)|is disabled because|will be ignored|is ignored"
    r"|falls? back|fallback|automatically|is forced|Setup Custom allreduce failed|Custom allreduce is disabled)\b",
    re.IGNORECASE,
)
_PREFIX = re.compile(r"^\[[^\]]*\]\s*")
_MOST_EVENTS = 40
_MOST_LETTERS = 300


@dataclass(slots=True)
class Start:
    """What is known of a server's start; filled line by line."""

    arguments: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    events: dict[str, Event] = field(default_factory=dict)
    version: str | None = None
    custom_all_reduce_failed: bool = False

    def take(self, line: str, *, counts_seconds: bool) -> None:
        """Look at one line.

        Args:
            counts_seconds: of one rank only: the others load and capture at the same time.
        """
        if (found := _LINE.search(line)) is not None:
            items = {item["name"]: _plain(item["value"]) for item in _ITEM.finditer(found["rest"])}
            self.arguments = items or self.arguments
            return
        if self.version is None and "version" in line and (told := _VERSION.search(line)) is not None:
            self.version = told["version"]
        for name, pattern in _SECONDS if counts_seconds else ():
            if (spent := pattern.search(line)) is not None:
                self.seconds[name] = self.seconds.get(name, 0.0) + float(spent["s"])
        if _CHANGES.search(line) and len(self.events) < _MOST_EVENTS:
            text = _PREFIX.sub("", line).strip()[:_MOST_LETTERS]
            self.custom_all_reduce_failed |= "ustom allreduce" in text
            self.events.setdefault(text, Event(name="argument_changed", detail=text))

    def settings(self) -> dict[str, str]:
        """Arguments that tell the configuration, without those that are None."""
        return {name: self.arguments[name] for name in _TOLD if self.arguments.get(name) not in (None, "None")}

    def drafting(self, *, seen: bool) -> Drafting:
        """How the server drafts.

        Args:
            seen: an accept length stands in the log, so it does, whatever else is missing.
        """
        algorithm = self.arguments.get("speculative_algorithm")
        if algorithm in (None, "None") and not seen:
            return Drafting(speculates=False if self.arguments else None)
        path = self.arguments.get("speculative_draft_model_path")
        return Drafting(
            speculates=True,
            num_steps=self.whole("speculative_num_steps"),
            eagle_topk=self.whole("speculative_eagle_topk"),
            num_draft_tokens=self.whole("speculative_num_draft_tokens"),
            drafter=None if path in (None, "None") else path.rstrip("/").rpartition("/")[2] or None,
        )

    def whole(self, name: str) -> int | None:
        """A whole number above 0 among the arguments."""
        text = self.arguments.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and 0 < int(text[:10]) < 2**31 else None

    def num_gpus(self) -> int:
        """Tensor x pipeline parallel, times the data-parallel servers that do not share them."""
        ranks = (self.whole("tp_size") or 1) * (self.whole("pp_size") or 1)
        apart = self.arguments.get("enable_dp_attention") != "True"
        return ranks * ((self.whole("dp_size") or 1) if apart else 1)

    def all_reduce(self) -> str | None:
        """What serves decode-size all-reduces as far as arguments and warnings tell; None if they do not."""
        if not self.arguments:
            return None
        if self.num_gpus() == 1 or self.arguments.get("tp_size") == "1":
            return "none"
        refused = self.custom_all_reduce_failed or self.arguments.get("disable_custom_all_reduce") == "True"
        return "nccl" if refused else None


def model_of(arguments: Mapping[str, str]) -> str | None:
    """Name of the model, without the folder that it lies in."""
    path = arguments.get("model_path", "None")
    return None if path == "None" else path.rstrip("/").rpartition("/")[2] or None


def _plain(value: str) -> str:
    return value[1:-1] if value[:1] in "'\"" else value
