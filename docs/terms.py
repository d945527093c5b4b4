"""Links from the first use of a term on a page to its definition in the glossary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: Terms that pages use for other things as well, such as the keys of credentials.
AMBIGUOUS = {"key"}


class Use(NamedTuple):
    """The first use of a term in some text: where it is, and the term."""

    start: int
    end: int
    term: str


def first_uses(text: str, terms: Iterable[str]) -> Iterator[Use]:
    """Yield where a text first uses each of some terms, from its beginning to its end.

    >>> list(first_uses("Shards have samples. A shard is a file.", ["shard", "sample", "lane"]))
    [Use(start=0, end=6, term='shard'), Use(start=12, end=19, term='sample')]
    >>> list(first_uses("It fails twice in a row.", ["row"]))
    []
    """
    unused = {term for term in terms if term not in AMBIGUOUS}
    plural = {f"{term}{'es' if term.endswith(('x', 'ch', 'ss')) else 's'}": term for term in unused}
    words = "|".join(sorted({*unused, *plural}, key=len, reverse=True))
    for match in re.finditer(rf"(?<!\bin a )\b(?:{words})\b(?!-)", text, re.IGNORECASE) if words else ():
        term = plural.get(match[0].lower(), match[0].lower())
        if term in unused:
            unused.remove(term)
            yield Use(*match.span(), term)
