"""URL safety: rejects untrusted URLs of local files and commands."""

from __future__ import annotations

from wds_datapipes.errors import UnsafeInputError
from wds_datapipes.io.local import local_path
from wds_datapipes.io.urls import is_registered, split_scheme
from wds_datapipes.redaction import redact

#: The schemes that ``allow_local_files=False`` opens: files on a network. All others are rejected, since fsspec has
#: file systems that read local files, unpack archives, or read from another URL.
NETWORK_SCHEMES = frozenset(
    {"abfs", "abfss", "ais", "az", "ftp", "gcs", "gs", "hf", "http", "https", "s3", "s3a", "sftp"}
)
#: The schemes of commands and standard input.
COMMANDS = ("pipe", "-")
#: Errors show this many characters of a rejected URL.
SHOWN = 200


def check_url(url: str, *, allow_local_files: bool = True, listed_in: str | None = None) -> None:
    """Raise unless a URL may be opened.

    Args:
        url: the URL, after rewriting rules and variables are applied.
        allow_local_files: False accepts only files on a network.
        listed_in: the path or URL of the file that lists it, if one does. One that is not on this host may not name
            commands or standard input.

    Raises:
        UnsafeInputError: it is a command or standard input, and the file that lists it is remote. Or only files on a
            network are accepted, and it is a path, a command, standard input or a chain of file systems; or its scheme
            is not in `NETWORK_SCHEMES`, or has an opener of `register_opener`.
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
    """Return what a URL is, if it is not that of a file on a network."""
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
