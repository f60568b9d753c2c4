"""Special cases of the search, each with a switch. `benchmarks.search_cost --without RULE` measures what each wins."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """One switch for each special case. Without any of them the search is still a search, of a plainer kind."""

    # Which configuration is measured next
    first_chain: bool = True
    """The first candidate is the longest chain: its accept histogram tells the accept length of all shorter ones."""
    untested_topk: bool = True
    """Before the search stops, the incumbent's NCCL set is measured at another top-k."""
    unlaunched_sets: bool = True
    """Before the search stops, each NCCL set that acts is launched once."""
    settling: bool = True
    """Once the incumbent is probably right, only draws in which it is not are scored."""

    # When a running trial is stopped
    bound: bool = True
    """A trial ends if its optimistic throughput is below the incumbent's."""

    # What the model believes
    noisy_launches: bool = True
    """Launches of drafting servers have a scale of their own if their blocks scatter."""
    equivalent_sets: bool = True
    """NCCL sets that do not act are one configuration."""
    all_reduce_prior: bool = True
    """The all-reduce table, if one is given, says where NCCL sets start from."""
    widening: bool = True
    """A factor gets more terms once a measurement contradicts it."""

    def without(self, name: str) -> Rules:
        """The same without one rule. Raises ValueError with the names of all rules."""
        if name not in RULES:
            raise ValueError(f"wanted one of {', '.join(RULES)}, got {name!r}")
        return replace(self, **{name: False})


RULES = tuple(entry.name for entry in fields(Rules))
"""Names of all rules."""
