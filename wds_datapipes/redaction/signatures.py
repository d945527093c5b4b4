"""Signatures in the queries of presigned URLs, which change whenever a URL is signed again."""

from __future__ import annotations

import re

#: The query of a URL within a text.
QUERY = re.compile(r"\?([^\s'\"#?\0]*)")

#: The parameters of the earlier signatures of S3, Google and Alibaba, and of CloudFront.
KEYS = r"expires|policy|key-pair-id|(?:aws|oss)accesskeyid|googleaccessid"
#: For each kind of signature: the parameter that holds it, one that comes with it, and all that signing adds.
SIGNATURES = tuple(
    (holder, re.compile(beside), re.compile(added))
    for holder, beside, added in (
        ("x-amz-signature", r"x-amz-.*", r"x-amz-.*"),  # S3
        ("x-goog-signature", r"x-goog-.*", r"x-goog-.*"),  # Google Cloud Storage
        ("x-oss-signature", r"x-oss-.*", r"x-oss-.*"),  # Alibaba
        ("signature", KEYS, rf"signature|{KEYS}|hash-algorithm|(?:x-amz-)?security-token"),
        ("sig", r"sv", r"sig|s[vserpti]|srt|sip|spr|sdd|scid|ses|s[au]oid|sk(?:oid|tid|[tesv])"),  # Azure
    )
)


def without_signature(text: str) -> str:
    """Return a text without the signatures of the URLs in it: of S3, Google, Azure, CloudFront and similar stores.

    >>> without_signature("https://host/000.tar?versionId=3&X-Amz-Date=20261129T1200Z&X-Amz-Signature=0123abcd")
    'https://host/000.tar?versionId=3'
    """
    return QUERY.sub(_without_signature, text) if "sig" in text or "Sig" in text else text


def _without_signature(query: re.Match[str]) -> str:
    parts = query[1].split("&")
    names = [part.partition("=")[0].lower() for part in parts]
    for holder, beside, added in SIGNATURES:
        if holder in names and any(name != holder and beside.fullmatch(name) for name in names):
            rest = "&".join(part for part, name in zip(parts, names, strict=True) if not added.fullmatch(name))
            return f"?{rest}" if rest else ""
    return query[0]
