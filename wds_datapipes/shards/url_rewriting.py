"""URL rewriting: rules that read shards from another location than their URLs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from wds_datapipes.errors import PatternError

__all__ = ["Rewrite", "Rules", "rewrite_url", "rules_of"]

Rewrite = Sequence[tuple[str, str]]
"""Pairs of a regular expression, which has to match where a URL begins, and what takes the place of the match."""

Rules = list[tuple[re.Pattern[str], str]]
"""The same, compiled."""

#: What AIStore calls the stores behind the schemes of URLs.
PROVIDERS = {"ais": "ais", "s3": "aws", "aws": "aws", "gs": "gcp", "gcp": "gcp", "az": "azure", "azure": "azure"}


def rules_of(rewrite: Rewrite | None, variables: Mapping[str, str]) -> Rules:
    r"""Return the given rules, or those of the environment, followed by that of AIStore.

    >>> rules = rules_of(None, {"WDS_REWRITE": "gs://data/=/mnt/data/;s3://=http://cache/"})
    >>> rewrite_url("gs://data/0.tar", rules), rewrite_url("s3://bucket/0.tar", rules), rewrite_url("0.tar", rules)
    ('/mnt/data/0.tar', 'http://cache/bucket/0.tar', '0.tar')
    >>> rules = rules_of(None, {"AIS_ENDPOINT": "http://ais:51080", "USE_AIS_FOR": "gs:s3"})
    >>> rewrite_url("gs://bucket/train/0.tar", rules)
    'http://ais:51080/v1/objects/bucket/train/0.tar?provider=gcp'

    Args:
        rewrite: the rules; None takes those of ``WDS_REWRITE`` or ``GOPEN_REWRITE``, which are separated by ``;``, and
            have a ``=`` between the expression and what takes its place.
        variables: the environment. ``AIS_ENDPOINT`` is where an AIStore cluster answers for ``ais:`` URLs, and
            ``USE_AIS_FOR`` names other schemes that go there, separated by ``:``.

    Raises:
        PatternError: a rule cannot be read.
    """
    if rewrite is None:
        name = "WDS_REWRITE" if "WDS_REWRITE" in variables else "GOPEN_REWRITE"
        rewrite = list(_pairs(name, variables.get(name, "")))
    rules = []
    for expression, replacement in rewrite:
        try:
            pattern = re.compile(expression)
            pattern.sub(replacement, "")
        except (re.error, IndexError) as error:
            raise PatternError(
                f"The rule that rewrites {expression!r} to {replacement!r} is no regular expression with its "
                f"replacement: {error}"
            ) from error
        rules.append((pattern, replacement))
    return [*rules, *_rules_of_aistore(variables)]


def rewrite_url(url: str, rules: Rules) -> str:
    """Rewrite a URL by the first rule that changes it."""
    for pattern, replacement in rules:
        match = pattern.match(url)
        if match and (found := match.expand(replacement) + url[match.end() :]) != url:
            return found
    return url


def _pairs(name: str, text: str) -> Iterable[tuple[str, str]]:
    """Yield the rules in the value of a variable."""
    for rule in text.split(";"):
        if rule:
            expression, sign, replacement = rule.partition("=")
            if not sign:
                raise PatternError(f"The rule {rule!r} in {name} has no '='. Write it as EXPRESSION=REPLACEMENT")
            yield expression, replacement


def _rules_of_aistore(variables: Mapping[str, str]) -> Iterable[tuple[re.Pattern[str], str]]:
    schemes = ["ais", *filter(None, variables.get("USE_AIS_FOR", "").split(":"))]
    endpoint = variables.get("AIS_ENDPOINT", "")
    if unknown := [each for each in schemes if each not in PROVIDERS]:
        raise PatternError(f"USE_AIS_FOR names {unknown[0]!r}. AIStore stands for {', '.join(sorted(PROVIDERS))}")
    if not endpoint:
        if schemes[1:]:
            raise PatternError(
                "USE_AIS_FOR is set, and AIS_ENDPOINT is not. Set it to the address of the cluster, such as "
                "http://localhost:51080"
            )
        return
    for scheme in schemes:
        replacement = rf"{endpoint.rstrip('/')}/v1/objects/\1/\2?provider={PROVIDERS[scheme]}"
        yield re.compile(rf"{scheme}://([^/?#]+)/([^?#]+)$"), replacement
