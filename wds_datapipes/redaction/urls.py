"""Redact credentials in text: the user info and queries of URLs, and values that are named like credentials."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from urllib.parse import unquote

from wds_datapipes.redaction.signatures import without_signature

SCHEME = re.compile(r"(?i)[a-z][a-z\d+.-]{0,30}\Z")
#: The text up to white space; an ``@`` at its end may be a part of a password that continues.
WORD = re.compile(r"(?:\S{0,1024}@\s{1,99})?\S*")
#: The end of a query within a longer text: a quote, or the next part of a chained URL.
QUERY_END = re.compile(r"['\"`]|::")
#: The parts of a query, each with the preceding character.
PARTS = re.compile(r"([?&;#])([^?&;#]*)")
#: Digits up to a slash are a port, unless a host follows the last ``@``. Before ``?`` and ``#``, they may also be the
#: beginning of a password.
PORT = re.compile(r"\d{1,9}(?:/|\Z)")
HOST_TEXT = (
    r"(?i:localhost|\[[\da-f:.]{2,45}\]|\d{1,3}(?:\.\d{1,3}){3}|(?:[\w-]{1,63}\.){1,9}[a-z]{2,63}"
    r"|[\w.-]{1,99}(?=:\d))(?::\d{1,5})?/"
)
HOST = re.compile(HOST_TEXT)
#: A query that begins with a named parameter.
NAMED_QUERY = re.compile(r"[?#][\w.~-]+=")

#: The query parameters whose values are shown: versions and parts of files, and the time and scope of a signature.
HARMLESS = re.compile(
    "(?i)alt|branch|dl|download|file|filename|format|generation|limit|name|offset|page|part|partnumber|path|prefix|raw|ref|"
    "rev|revision|shard|split|version|versionid|expires|response-content-type|x-id|"
    "x-(?:amz|goog)-(?:algorithm|date|expires|signedheaders)|se|ske|sks|skt|skv|sp|spr|sr|st|sv"
)
#: The values of such parameters, which contain no URL.
PLAIN = re.compile(r"(?i)(?:[\w.,:/~*+ -]|%(?:2[0CF]|3[AB])){0,200}")
#: The name of a parameter, and values that are too short to be credentials.
NAME, SHORT = re.compile(r"[\w.%~\[\]-]{1,60}"), re.compile(r"\d{0,5}|true|false|\*\*\*")


def redact_urls(text: str, *, is_url: bool = False) -> str:
    """Replace the user info and the values of query parameters in all URLs of a text with ``***``.

    If the text is a URL, white space does not end it.

    >>> redact_urls("https://me:a#b@host/000.tar?versionId=x2&token=0123abcd#top")
    'https://***@host/000.tar?versionId=x2&token=***#***'
    """
    pieces = text.split("://")
    if len(pieces) == 1:
        return text
    is_one = SCHEME.match(pieces[0]) is not None and (is_url or not re.search(r"\s", text))
    return "://".join(_redacted(pieces, is_one))


def hidden_parts(url: str) -> Iterator[str]:
    """Yield the parts of a URL that `redact_urls` hides, and fragments of them, for messages that quote them."""
    for before, piece in pairwise(url.split("://")):
        begin = _user_info(piece, before.lower().endswith(("http", "https")))
        name, colon, password = piece[: max(begin - 1, 0)].partition(":")
        parts = [part for _, part in PARTS.findall(piece[begin:]) if _redact_part("?", part, "") != part]
        secrets = [password if colon else name, *(part.partition("=")[2] for part in parts)]
        for secret in secrets:
            yield from (part for part in (secret, unquote(secret), *re.split(r"[/?#:@\s]", secret)) if len(part) > 2)


def _redacted(pieces: list[str], is_one: bool) -> Iterator[str]:
    """Yield the redacted pieces of a text between the ``://`` of its URLs; ``is_one`` if the text is a single URL."""
    yield pieces[0]
    for before, piece in pairwise(pieces):
        found = SCHEME.search(before[-31:])
        scheme = found[0].lower() if found else ""
        # In a single URL, a user or a password may contain white space.
        found = WORD.match(piece, piece.rfind("@") + 1 if is_one else 0)
        word = piece[: found.end() if found else 0]
        begin = _user_info(word, scheme in ("http", "https"))
        shown, rest = ("***@", piece[begin:]) if begin else ("", piece)
        query = re.search("[?#]", word[begin:])
        if query is None or scheme == "file":
            yield shown + rest
            continue
        end = len(word) - begin
        if (stop := QUERY_END.search(rest, query.start(), end)) and not (is_one and stop[0] != "::"):
            end = stop.start()
        yield shown + rest[: query.start()] + _redact_query(rest[query.start() : end], scheme) + rest[end:]


def _user_info(word: str, is_web: bool) -> int:
    """Return the length of the user info, with its ``@``, at the beginning of the text after ``://``; 0 if it is safe.

    A name without a password is safe, as in Azure's ``abfs://container@account``, except in a web URL, where it may be
    a token.
    """
    head, at, _ = word.partition("@")
    if not at or head.startswith("["):
        return 0
    name, colon, password = head.partition(":")
    is_port = PORT.match(password) and not HOST.match(word, word.rfind("@") + 1)
    is_password = colon and not re.search("[/?#]", name) and not is_port
    if not (is_password or (is_web and "/" not in head)):
        return 0
    query = re.search("[?#]", word)
    if query is None:
        return word.rfind("@") + 1
    within = word.rfind("@", 0, query.start()) + 1
    # A password may contain ? and #.
    is_part = "@" in word[query.start() :] and not NAMED_QUERY.match(word, query.start())
    return word.rfind("@") + 1 if not within or is_part else within


def _redact_query(query: str, scheme: str) -> str:
    return "".join(mark + _redact_part(mark, part, scheme) for mark, part in PARTS.findall(query))


def _redact_part(mark: str, part: str, scheme: str) -> str:
    name, equals, value = part.partition("=")
    if not value.strip("="):
        # A glob, or the name of an object in a store.
        is_name = scheme not in ("http", "https") and re.fullmatch(r"[\w.*-]*\.[a-z]{2,8}|[*{}\d.]*", part)
        return part if is_name or SHORT.fullmatch(part) or HARMLESS.fullmatch(name) else "***"
    if mark == "#" or not NAME.fullmatch(name):
        return "***"
    is_harmless = SHORT.fullmatch(value) or (HARMLESS.fullmatch(name) and PLAIN.fullmatch(value))
    return part if is_harmless else f"{name}{equals}***"


# Errors quote untrusted responses of servers, so every pattern must run in linear time: a repetition is bounded
# wherever another match could start within it.

#: Parts of the names of credentials.
NAMES = (
    r"auth|credential|passw|passphrase|secret|signature|token|cookie|session|jwt|hmac|hdnt|"
    r"api[-_]?key|access[-_]?key|account[-_]?key|private[-_]?key|key-pair"
)

#: The user info of a web URL: everything before the ``@``.
WEB_USER = re.compile(r"(?i)(https?://?)[^\s/?#]*@")
#: ``user:password@`` of any scheme. Without a password, it is a name, as in Azure's ``abfs://container@account``.
#: Digits up to a slash are a port; any other text may be a password, even with a slash that should be escaped as %2F.
PASSWORD = re.compile(r"(\w://?)[^\s/?#:@\[]{0,1024}:(?!:|\d{1,9}(?:[/?#]|$))[^\s?#]{0,1024}@")

#: The same with white space, or with digits and a slash, in the password, if a host follows the ``@``. No other URL is
#: part of it.
UNUSUAL = re.compile(
    r"(?s)(\w://?)[^\s/?#:@\[]{0,1024}:"
    rf"(?:(?!\d{{0,9}}(?:[\s/?#]|$))(?:(?!://).){{0,256}}?@(?=[\w.-]{{1,99}}/|{HOST_TEXT})"
    rf"|\d{{1,9}}/\S{{0,256}}?@(?={HOST_TEXT}))"
)

#: The values of query parameters that sign or authorize, as in AWS, Google, Azure, CloudFront, Akamai and common APIs.
#: The parameters may be percent-encoded within another URL.
PARAMETER = re.compile(
    rf"(?i)((?:[?&;]|%3F|%26)(?:[\w.-]{{0,99}}(?:{NAMES})"
    r"[\w.-]{0,99}|sig|sign|key|policy|pwd)(?:=|%3D))[^&;\s'\"]+"
)

#: The values of headers such as ``Authorization``, ``X-Api-Key`` and ``Cookie``.
HEADER = re.compile(r"(?i)((?:authorization|token|cookie|api-?key)\s*:\s*|\bbearer\s+)[^\s'\"][^'\"\r\n]*")

#: Quoted values, as printed by Python and JSON.
NAMED = re.compile(
    r"(?i)((?:credential|passw|passphrase|secret|signature|token(?!i[sz])|api[-_]?key|access_?key|account_?key|"
    r"authorization|cookie)[\w-]{0,99}['\"]?\s*[:=]\s*b?)(['\"])(?:(?!\2).)+\2"
)
#: Parts of connection strings.
CONNECTION = re.compile(r"(?i)\b((?:account_?key|shared_?access_?(?:key|signature)|password|pwd)=)[^;\s'\"&]+")

#: The values of command-line options such as ``--token`` and ``-u name:password``, and of environment variables.
COMMAND = re.compile(
    r"(?i)((?:^|[\s;'\":])(?:--[\w-]{0,99}(?:credential|passw|passphrase|secret|token|api-?key|access-?key)[\w-]{0,99}"
    r"(?:=|\s+)|\w{0,99}(?:credential|passw|passphrase|secret|token|api_?key|access_?key)\w{0,99}="
    r"|(?:-u|--(?:proxy-)?user)(?:=|\s{0,9})['\"]?[^\s:'\"]{1,99}:))[^\s;'\"]+"
)


def mask_credentials(text: str) -> str:
    """Replace credentials in a text that are recognized by their names with ``***``.

    The result identifies a URL: signing the URL again does not change it, but other parameters do.

    >>> mask_credentials("https://host/?file=000.tar&token=0123abcd")
    'https://host/?file=000.tar&token=***'
    >>> mask_credentials("https://host/?file=000.tar&X-Amz-Date=20261129T1200Z&X-Amz-Signature=0123abcd")
    'https://host/?file=000.tar'
    """
    text = WEB_USER.sub(r"\1***@", without_signature(text))
    text = PASSWORD.sub(r"\1***@", UNUSUAL.sub(r"\1***@", text))
    text = PARAMETER.sub(r"\1***", text)
    text = NAMED.sub(r"\1\2***\2", text)
    text = CONNECTION.sub(r"\1***", text)
    if "pipe:" in text:
        text = COMMAND.sub(r"\1***", text)
    return HEADER.sub(r"\1***", text)


def may_hold_credentials(text: str) -> bool:
    """Whether redaction may change a URL; if not, this check is cheaper than redacting it."""
    # A search for one character is ten times as fast.
    return any(mark[0] in text and mark in text for mark in ("@", "=", "?", "#", "%3D", "%3d", "pipe:", "PIPE:"))
