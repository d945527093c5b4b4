"""Redaction of shell commands: keeps programs, paths, URLs and the names of options, and hides all other words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from wds_datapipes.redaction.credentials import NAMES, mask_credentials
from wds_datapipes.redaction.urls import redact_urls

#: Spaces, redirections, other operators, and words with their quotes. All text matches.
TOKEN = re.compile(
    r"(?s)(?P<space>(?:[ \t\r]|\\\n)+)|(?P<redirect>\d*(?:&>>?|<<<|<<-?|<>|>>|>\||[<>]&?))|(?P<operator>[|&;()`\n])"
    r"|(?P<word>(?:\\.|\\\Z|'[^']*(?:'|\Z)|\"(?:\\.|[^\"\\])*(?:\"|\\?\Z)|[^\s|&;()<>`'\"\\]|[^\S \t\r\n])+)"
)
QUOTED = re.compile(r"(?s)'([^']*)'?|\"((?:\\.|[^\"\\])*)\"?|\\(.?)")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w{0,60}\+?=")
PROGRAM = re.compile(r"[A-Za-z_][\w.+-]{0,60}|\[\[?|(?:~|\.{0,2})/[\w./+-]*")
#: Words that another command follows.
RESERVED = re.compile("[!{}]|case|do|elif|else|env|exec|for|if|nohup|sudo|then|time|until|while")

#: Frequent programs and subcommands, which are shown anywhere.
KNOWN = re.compile(
    r"aws|az|bash|bunzip2|bzip2|cat|copyto|cp|curl|dd|download|echo|exec|false|gcloud|get|gpg|gs|gsutil|gunzip|gzip|head|"
    r"hf|lz4|oci|openssl|pigz|pv|python3?|rclone|s3|s3api|scp|sh|ssh|sshpass|storage|sudo|tail|tar|tee|time|true|unzstd|"
    r"wget|xz|xzcat|yes|zcat|zstd|zstdcat|\[{1,2}|\]{1,2}|\*\*\*|--?|\.{1,2}|[{}!$~]"
)
#: Paths: from the root, the home or the working directory, or files with a usual extension. With both, a path may also
#: have @ and #, but no spaces: those of a command would have them, too.
EXTENSIONS = (
    "7z|aes|age|bin|bz2|cbor|cfg|cls|conf|csv|enc|flac|gpg|gz|idx|index|jpe?g|jsonl?|lz4|lzma|mp4|msgpack|ndjson|npy|npz|"
    "out|parquet|part|pem|pgp|png|pth|pub|py|sh|tar|tbz2?|tgz|tmp|tsv|txt|txz|wav|wdsidx|xz|ya?ml|zip|zst"
)
PATH = re.compile(
    rf"(?:~|\.{{1,2}})?/[\w./%~*?{{}}-]*(?:,[\w./%~*?{{}}-]+)*|[\w./%~*?{{}}-]*\.(?:{EXTENSIONS})|/dev/[\w/]+"
    rf"|/[\w./%~*?{{}}@#-]*\.(?:{EXTENSIONS})"
)
#: The name of a parameter whose value is a path, as in ``if=/data/a``.
SHORT_NAME = re.compile(r"[a-z][a-z-]{0,15}=")
#: Small numbers, and references to variables.
PLAIN = re.compile(r"\d{1,5}[kKMG]?|\$(?:\w+|\{\w+\}|[$?!#@*])")
URL = re.compile(r"([\w-]{0,30}=)?[A-Za-z][\w+.-]{0,30}://\S*")

LONG_OPTION = re.compile(r"--?[A-Za-z][\w.-]{2,60}")
SHORT_OPTIONS = re.compile(r"-[A-Za-z\d]{1,5}-?")
#: Options whose value is often a password, a token, a cookie or a header.
CREDENTIAL_OPTIONS = frozenset("bHkKpPuUwW")
CREDENTIAL = re.compile(rf"(?i){NAMES}|pass|pwd|user|header|key|sig")

#: Hidden words of at least this many characters are hidden in the messages of the command as well.
LONG = 6
#: How deep a command within the words of another one is redacted as a command.
DEPTH = 2


def redact_command(command: str) -> str:
    """Replace the words of a shell command that are not known to be harmless with ``***``.

    >>> redact_command("gpg --batch --passphrase hunter2 -d /data/000.tar.gpg | zstd -dc 2>/dev/null")
    'gpg --batch --passphrase *** -d /data/000.tar.gpg | zstd -dc 2>/dev/null'
    """
    return mask_credentials("".join(shown for _, shown in _tokens(command, DEPTH)))


def hidden_words(command: str) -> set[str]:
    """Return the words of a command that `redact_command` hides, and their parts, if they are not short."""
    tokens = [token for token, shown in _tokens(command, 0) if token != shown]
    words = [_unquote(token) for token in tokens]  # a message may quote the command itself
    words += [word[2:] if word.startswith("-") else word.partition("=")[2] for word in words]
    words += [word.partition("=")[2] for word in words]
    parts = [part for word in words for marks in ("[:=,;@&]+", r"[\s:=,;@&]+") for part in re.split(marks, word)]
    return {word for word in (*tokens, *words, *parts) if len(word) >= LONG}


def _tokens(command: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield each token of a command, and the text to show for it."""
    expects_program, is_value, hides, target = True, False, False, False
    for match in TOKEN.finditer(command):
        kind, token = match.lastgroup, match[0]
        if kind == "redirect":
            if token.endswith(("<<", "<<-")) and not token.endswith("<<<"):  # a document follows
                yield token, token
                yield command[match.end() :], "***"
                return
            target = token[-1] != "<" or len(token) == 1
        elif kind == "operator":
            # Words in parentheses after "name=" are values of an array.
            expects_program = not token.startswith(")") and command[match.start() - 1 : match.start()] != "="
            is_value = hides = False
        if kind != "word":
            yield token, token
            continue
        word = _unquote(token)
        if target and re.fullmatch(r"[\w./%~*{}-]+|&?\d", word):
            yield token, token
        elif target:
            yield token, _show(token, word, depth) or "***"
        elif expects_program and (found := ASSIGNMENT.match(token)):
            value = "" if len(word) == found.end() else "***"
            yield token, _after_name(found[0], token[found.end() :]) or found[0] + value
        elif expects_program:
            expects_program = RESERVED.fullmatch(word) is not None
            shown = token if PROGRAM.fullmatch(word) or RESERVED.fullmatch(word) else _show(token, word, depth)
            yield token, shown or "***"
        elif word.startswith("-") and word not in ("-", "--"):
            shown, is_value, hides = _show_option(word)
            yield token, token if shown == word else shown
            continue
        elif is_value and hides:
            yield token, _show_url(token, word) or "***"
        else:
            yield token, _show(token, word, depth) or "***"
        is_value = target = False


def _unquote(token: str) -> str:
    """Return the value of a word."""
    return QUOTED.sub(lambda part: part[1] or re.sub(r"\\([$`\"\\\n])", r"\1", part[2] or "") or part[3] or "", token)


def _show_option(word: str) -> tuple[str, bool, bool]:
    """Return the text of an option, whether a value may follow, and whether that is often a credential."""
    name, equals, value = word.partition("=")
    if word.startswith("--") and LONG_OPTION.fullmatch(name):
        if not equals:
            return word, True, CREDENTIAL.search(name) is not None
        return _after_name(f"{name}=", value) or f"{name}=***", False, False
    if SHORT_OPTIONS.fullmatch(word) and (len(word) == 2 or word[1] not in CREDENTIAL_OPTIONS):
        return word, True, word[-1] in CREDENTIAL_OPTIONS
    return f"{word[:2]}***", True, False


def _after_name(name: str, value: str) -> str:
    """Return a name and its value, or "" if the value is hidden."""
    shown = "" if CREDENTIAL.search(name) else _show(value, _unquote(value), 0)
    return name + shown if shown else ""


def _show(token: str, word: str, depth: int) -> str:
    """Return the text of a word that is known to be harmless, or ""."""
    if KNOWN.fullmatch(word) or PATH.fullmatch(word) or PLAIN.fullmatch(word):
        return token
    if shown := _show_url(token, word):
        return shown
    start = max(map(word.rfind, ":=,")) + 1
    if start and PATH.fullmatch(path := word[start:]):  # after a host, or settings of rclone
        name = word[:start]
        if name.endswith("=") and CREDENTIAL.search(re.split("[:=,]", name)[-2]):
            return ""
        return word if SHORT_NAME.fullmatch(name) else f"***{name[-1]}{path}"
    if (
        depth
        and token[0] in "'\""
        and token[-1] == token[0]
        and (found := PROGRAM.match(word))
        and KNOWN.fullmatch(found[0])
    ):
        inner = "".join(shown for _, shown in _tokens(word, depth - 1))
        return f"{token[0]}{inner}{token[0]}"
    return ""


def _show_url(token: str, word: str) -> str:
    """Return the text of a URL, or of a parameter whose value is a URL, or ""."""
    found = URL.fullmatch(word)
    if not found or word not in token or (found[1] and CREDENTIAL.search(found[1])):
        return ""
    return token.replace(word, redact_urls(word))
