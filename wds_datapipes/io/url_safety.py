"""URL safety: rejects untrusted URLs of local files and commands."""

from __future__ import annotations

from wds_datapipes.errors import UnsafeInputError
from wds_datapipes.io.local import local_path
from wds_datapipes.io.urls import is_registered, split_scheme
from wds_datapipes.redaction import redact

__all__ = ["NETWORK_SCHEMES", "refuse_commands", "refuse_unsafe"]

#: The schemes that ``safe=True`` opens: files on a network. All others are rejected, since fsspec has file systems that
#: read local files, unpack archives, or read from another URL.
NETWORK_SCHEMES = frozenset(
    {"abfs", "abfss", "ais", "az", "ftp", "gcs", "gs", "hf", "http", "https", "s3", "s3a", "sftp"}
)
#: The schemes of commands and standard input.
COMMANDS = ("pipe", "-")
#: Errors show this many characters of a rejected URL.
SHOWN = 200


def refuse_unsafe(url: str) -> None:
    """Raise unless a URL names a file on a network.

    Raises:
        UnsafeInputError: the URL is a path, a command, standard input or a chain of file systems; or its scheme is not
            in `NETWORK_SCHEMES`, or has an opener of `register_opener`.
    """
    scheme, _ = split_scheme(url)
    if scheme in COMMANDS:
        found = "a command" if scheme == "pipe" else "standard input"
    elif scheme == "":
        found = "a local path"
    elif scheme not in NETWORK_SCHEMES:
        found = f"of the scheme {scheme!r}"
    elif is_registered(scheme):
        found = f"of the scheme {scheme!r}, for which an opener was registered"
    elif "::" in url:
        found = "a chain of file systems"
    else:
        return
    raise UnsafeInputError(
        f"{_redacted(url)} was refused: it is {found}. With safe=True, only files on a network are opened, with the "
        f"schemes {', '.join(sorted(NETWORK_SCHEMES))}"
    )


def refuse_commands(url: str, listed_in: str) -> None:
    """Raise if a URL from a remote file is a command or standard input.

    Args:
        url: the URL, after rewriting rules and variables are applied.
        listed_in: the path or URL of the file that lists it.

    Raises:
        UnsafeInputError: it is a command or standard input, and the file is remote.
    """
    scheme, _ = split_scheme(url)
    if scheme in COMMANDS and local_path(listed_in) is None:
        found = "a command" if scheme == "pipe" else "standard input"
        raise UnsafeInputError(
            f"{_redacted(url)} was refused: it is {found}, listed in {redact(listed_in)}, which is not a local file. "
            f"If you trust the author of that file to run commands on this host, pass allow_commands=True"
        )


def _redacted(url: str) -> str:
    text = redact(url)
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
