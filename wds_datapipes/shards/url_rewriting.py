"""URL rewriting: rules that redirect the URLs of shards to other locations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from wds_datapipes.errors import SpecError

Rewrite = Sequence[tuple[str, str]]
"""Pairs of a regular expression, which must match at the beginning of a URL, and a replacement for the match."""

Rules = list[tuple[re.Pattern[str], str]]
"""Compiled rewriting rules."""

#: AIStore's names for the stores of URL schemes.
PROVIDERS = {"ais": "ais", "s3": "aws", "aws": "aws", "gs": "gcp", "gcp": "gcp", "az": "azure", "azure": "azure"}


def compile_rules(rewrite: Rewrite | None, variables: Mapping[str, str]) -> Rules:
    r"""Compile the given rules, or those of the environment, followed by those of AIStore.

    >>> rules = compile_rules(None, {"WDS_REWRITE": "gs://data/=/mnt/data/;s3://=http://cache/"})
    >>> rewrite_url("gs://data/0.tar", rules), rewrite_url("s3://bucket/0.tar", rules), rewrite_url("0.tar", rules)
    ('/mnt/data/0.tar', 'http://cache/bucket/0.tar', '0.tar')
    >>> rules = compile_rules(None, {"AIS_ENDPOINT": "http://ais:51080", "USE_AIS_FOR": "gs:s3"})
    >>> rewrite_url("gs://bucket/train/0.tar", rules)
    'http://ais:51080/v1/objects/bucket/train/0.tar?provider=gcp'

    Args:
        rewrite: the rules; None takes those of ``WDS_REWRITE`` or ``GOPEN_REWRITE``, written as
            ``EXPRESSION=REPLACEMENT`` and separated by ``;``.
        variables: the environment. ``AIS_ENDPOINT`` is the address of an AIStore cluster for ``ais:`` URLs, and
            ``USE_AIS_FOR`` names further schemes to redirect there, separated by ``:``.

    Raises:
        SpecError: a rule is invalid.
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
            raise SpecError(
                f"The rule that rewrites {expression!r} to {replacement!r} is not a valid regular expression with a "
                f"replacement: {error}"
            ) from error
        rules.append((pattern, replacement))
    return [*rules, *_aistore_rules(variables)]


def rewrite_url(url: str, rules: Rules) -> str:
    """Rewrite a URL with the first rule that changes it."""
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
                raise SpecError(f"The rule {rule!r} in {name} has no '='. Write it as EXPRESSION=REPLACEMENT")
            yield expression, replacement


def _aistore_rules(variables: Mapping[str, str]) -> Iterable[tuple[re.Pattern[str], str]]:
    schemes = ["ais", *filter(None, variables.get("USE_AIS_FOR", "").split(":"))]
    endpoint = variables.get("AIS_ENDPOINT", "")
    if unknown := [each for each in schemes if each not in PROVIDERS]:
        raise SpecError(f"USE_AIS_FOR names {unknown[0]!r}. AIStore supports {', '.join(sorted(PROVIDERS))}")
    if not endpoint:
        if schemes[1:]:
            raise SpecError(
                "USE_AIS_FOR is set, but AIS_ENDPOINT is not. Set it to the address of the cluster, such as "
                "http://localhost:51080"
            )
        return
    for scheme in schemes:
        replacement = rf"{endpoint.rstrip('/')}/v1/objects/\1/\2?provider={PROVIDERS[scheme]}"
        yield re.compile(rf"{scheme}://([^/?#]+)/([^?#]+)$"), replacement
