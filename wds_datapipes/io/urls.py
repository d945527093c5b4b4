"""URL schemes, and the registry of their openers."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.request import url2pathname

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import ShardError, ShardOpenError, UnsafeInputError
from wds_datapipes.io.file_systems import FILE_SYSTEMS, is_web
from wds_datapipes.redaction import redact
from wds_datapipes.types import Opener

#: Scheme -> "module:function", imported when the first URL of the scheme is opened.
BUILT_IN: dict[str, str] = {
    "": "wds_datapipes.io.openers:open_path",
    "-": "wds_datapipes.io.openers:open_standard_input",
    "file": "wds_datapipes.io.openers:open_path",
    "pipe": "wds_datapipes.io.shell_process:open_command",
}

#: The storage options that apply to every store and are not passed to its library.
STORE_OPTIONS = ("timeout_s", "retries")

#: The opener of a ``scheme://...`` without a registered one.
FALLBACK = "wds_datapipes.io.remote.remote_file:open_remote"

#: At least two characters, so that the drive letter of a Windows path is not a scheme.
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?")

#: The openers that `register_opener` has registered in this process.
_registered: dict[str, Opener] = {}


@checks_calls
def register_opener(scheme: str, opener: Opener, *, replace: bool = False) -> None:
    r"""Register a function that opens the URLs of a scheme, in this process.

    The function receives the whole URL, and the options of the reading stage as keyword arguments. It returns a binary
    stream that reads forward and that the stage closes. It opens both ``scheme:...`` and ``scheme://...``, and takes
    precedence over fsspec's file systems.

    Worker processes that are started by "spawn" or "forkserver" do not inherit the registration. Call this function in
    a module that the workers import too, such as the one that defines the opener.

    Examples:
        >>> import io
        >>> from wds_datapipes.io.openers import open_url
        >>> def open_zeros(url, /, **options):
        ...     size = int(url.removeprefix("zeros:"))
        ...     return io.BytesIO(bytes(size))
        >>> register_opener("zeros", open_zeros)
        >>> with open_url("zeros:3") as stream:
        ...     stream.read()
        b'\x00\x00\x00'

    Args:
        scheme: the part before the colon: a letter, then letters, digits, ``+``, ``-`` or ``.``; at least two
            characters, case-insensitive.
        opener: the function, see `Opener`.
        replace: replace the existing opener of the scheme.

    Raises:
        ValueError: ``scheme`` is not a valid scheme, or it has another opener and ``replace`` is not set.
    """
    if not SCHEME.fullmatch(f"{scheme}:"):
        raise ValueError(
            f"{scheme!r} cannot be the scheme of a URL. Use two characters or more: a letter, then letters, digits, "
            '"+", "-" or ".", without the colon'
        )
    name = scheme.lower()
    has_other = name in BUILT_IN or _registered.get(name, opener) is not opener
    if has_other and not replace:
        raise ValueError(f"URLs of the scheme {name!r} have an opener already. Pass replace=True to replace it")
    _registered[name] = opener


def split_scheme(url: str) -> tuple[str, str]:
    """Split a URL into its lower-case scheme and the part after the colon; the scheme of a local path is empty.

    A name with a colon is a path unless the colon is followed by ``//``, or the part before it has an opener.

    >>> split_scheme("S3://bucket/000.tar"), split_scheme("pipe:cat 000.tar"), split_scheme("run:000.tar")
    (('s3', '//bucket/000.tar'), ('pipe', 'cat 000.tar'), ('', 'run:000.tar'))
    """
    if url == "-":
        return "-", ""
    if match := SCHEME.match(url):
        scheme = match[1].lower()
        if match[2] or scheme in _registered or scheme in BUILT_IN:
            return scheme, url[match.end(1) + 1 :]
    return "", url


def store_of(url: str) -> str:
    """Return the scheme of a URL and its host or bucket.

    >>> store_of("https://ada:***@example.com:8080/shards/000.tar?token=***"), store_of("s3://bucket/000.tar")
    ('https://example.com:8080', 's3://bucket')
    """
    scheme, rest = split_scheme(url)
    return f"{scheme}://{re.split('[/?#]', rest.lstrip('/'), maxsplit=1)[0].rpartition('@')[2]}"


def without_query(url: str) -> str:
    """Return the URL of a file on a web server without its query, and any other URL unchanged."""
    return url.partition("?")[0] if is_web(split_scheme(url)[0]) else url


class OpeningURL(str):
    """A URL that carries its own opener.

    Attributes:
        local_path: the local file that is read.
    """

    local_path: str

    def opened(self, **options: Any) -> BinaryIO:
        """Open the shard."""
        raise NotImplementedError

    def disown(self, error: ShardError) -> None:
        """Report that the opened file is damaged or truncated."""


def local_path(url: str) -> str | None:
    """Return the path of the local file that a URL names, or ``None`` if the URL is not a local file.

    >>> local_path("data/000.tar"), local_path("file:///data/my%20000.tar"), local_path("s3://data/000.tar")
    ('data/000.tar', '/data/my 000.tar', None)

    Raises:
        ShardOpenError: the URL names a file of another host, or is a chain of file systems.
    """
    if isinstance(url, OpeningURL):
        return url.local_path
    scheme, _ = split_scheme(url)
    if scheme == "file":
        return file_url_path(url)
    if scheme:
        return None
    if "::" in url and "://" in url:
        raise ShardOpenError(
            f"{redact(url)!r} is a chain of file systems, which is not supported. Name the file itself; "
            ".cache_wds_shards() keeps copies"
        )
    return url


def explain_home(path: str) -> str:
    """Return what to write for a path that begins with ``~``, which only shells replace; "" for other paths."""
    if path[:1] != "~":
        return ""
    return f"~ is not expanded: for a home directory, write {os.path.expanduser(path)!r}"  # noqa: PTH111  of other users, too


def explain_path(path: str) -> str:
    """Return a sentence about how a path that was not found is understood, to append to an error; "" if that is plain.

    >>> explain_path("/data/a.tar")
    ''
    """
    if home := explain_home(path):
        return f" {home}."
    braces = " Braces are expanded if they have a range, as in {000..009}, or commas." if "{" in path else ""
    return braces if os.path.isabs(path) else f" Relative paths start from {os.getcwd()}.{braces}"  # noqa: PTH109, PTH117


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file; False if no file can have this name, or its folder cannot be searched."""
    return os.path.isfile(path)  # noqa: PTH113  Path.is_file raises errors for these


def create_folder(path: Path) -> None:
    """Create a folder and those that it is in, unless it exists.

    Raises:
        OSError: it cannot be created.
        ValueError: its path begins with ``~``, which only shells replace.
    """
    if path.parts[:1] and path.parts[0][:1] == "~" and not path.exists():
        raise ValueError(
            f"{str(path)!r} would be in a folder with the name {path.parts[0]!r}: {explain_home(str(path))}"
        )
    path.mkdir(parents=True, exist_ok=True)


def file_url_path(url: str) -> str:
    """Return the path of a ``file:`` URL."""
    _, rest = split_scheme(url)
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise ShardOpenError(
                f"{redact(url)} names a file on the host {host.rpartition('@')[2]!r}, but file: URLs open only files "
                "on this host. Write file:///absolute/path or file:relative/path"
            )
        rest = slash + path
    return url2pathname(rest)


def find_opener(scheme: str) -> Opener:
    """Return the opener of a scheme."""
    if scheme in _registered:
        return _registered[scheme]
    module, _, function = BUILT_IN.get(scheme, FALLBACK).partition(":")
    return cast(Opener, getattr(importlib.import_module(module), function))


def is_registered(scheme: str) -> bool:
    """Whether a scheme has an opener of `register_opener`."""
    return scheme in _registered


def is_remote(scheme: str) -> bool:
    """Whether fsspec opens the URLs of a scheme."""
    return scheme not in BUILT_IN and scheme not in _registered


def known_schemes() -> list[str]:
    """Return the schemes that do not need fsspec: the built-in ones and those added by `register_opener`."""
    return sorted({*BUILT_IN, *_registered} - {""})


#: The schemes that ``allow_local_files=False`` allows.
NETWORK_SCHEMES = frozenset(scheme for scheme, found in FILE_SYSTEMS.items() if found.is_on_network)
#: The schemes of commands and standard input.
COMMANDS = ("pipe", "-")
#: Errors show this many characters of a rejected URL.
SHOWN = 200


def check_url(url: str, *, allow_local_files: bool = True, listed_in: str | None = None) -> None:
    """Raise an error unless a URL may be opened.

    Args:
        url: the URL, after rewriting rules and variables are applied.
        allow_local_files: False accepts only files on a network.
        listed_in: the path or URL of the file that lists it, if any. A file that is not on this host may not name
            commands or standard input.

    Raises:
        UnsafeInputError: a remote file lists a command or standard input; or only files on a network are accepted, and
            the URL is a path, a command, standard input or a chain of file systems, or its scheme is not in
            `NETWORK_SCHEMES` or has an opener of `register_opener`.
    """
    if not allow_local_files and (found := _not_on_network(url)):
        raise UnsafeInputError(
            f"{_redacted(url)} was refused: it is {found}. With allow_local_files=False, only files on a network are "
            f"opened, with the schemes {', '.join(sorted(NETWORK_SCHEMES))}"
        )
    if listed_in is not None and split_scheme(url)[0] in COMMANDS and local_path(listed_in) is None:
        raise UnsafeInputError(
            f"{_redacted(url)} was refused: it is {_not_on_network(url)}, listed in {redact(listed_in)}, which is not "
            f"a local file. If you trust the author of that file to run commands on this host, copy it here"
        )


def _not_on_network(url: str) -> str:
    """Describe a URL that does not refer to a file on a network; "" for others."""
    scheme, _ = split_scheme(url)
    if scheme in COMMANDS:
        return "a command" if scheme == "pipe" else "standard input"
    if scheme == "":
        return "a local path"
    if scheme not in NETWORK_SCHEMES:
        return f"of the scheme {scheme!r}"
    if is_registered(scheme):
        return f"of the scheme {scheme!r}, for which an opener was registered"
    return "a chain of file systems" if "::" in url else ""


def _redacted(url: str) -> str:
    text = redact(url)
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
