"""Names that a user may have meant: the end of a message about a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """The choice most like `value`, if any is like it; upper and lower case are alike."""
    folded = {choice.casefold(): choice for choice in choices}
    found = difflib.get_close_matches(value.casefold(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def choose(value: str, choices: Iterable[str]) -> str:
    """The end of a message about a wrong name: the nearest choice, then all of them."""
    names = list(choices)
    guess = nearest(value, names)
    listed = f"choices: {', '.join(names) or 'none'}"
    return f"did you mean {guess}? ({listed})" if guess else listed
