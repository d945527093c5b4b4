"""Compares the message of an error by its facts, so that its sentences may change."""

from __future__ import annotations

import re


def naming(*facts: object) -> str:
    """Return a pattern, for ``match=``, of a message that names all facts, such as a shard, a number or a hint."""
    return "(?s)^" + "".join(f"(?=.*{bounded(str(fact))})" for fact in facts)


def bounded(fact: str) -> str:
    """Return a pattern of a fact that is no part of a longer word or number."""
    before = r"(?<!\w)" if re.match(r"\w", fact) else ""
    after = r"(?!\w|[.,]\d)" if re.search(r"\w\Z", fact) else ""
    return before + re.escape(fact) + after
