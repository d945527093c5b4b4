"""URL safety: refuses untrusted URLs of local files and commands."""

from __future__ import annotations

from wds_datapipes.errors import RefusedURLError
from wds_datapipes.io.local import local_path
from wds_datapipes.io.redaction import redact
from wds_datapipes.io.urls import is_registered, split_scheme

__all__ = ["NETWORK_SCHEMES", "refuse_commands", "refuse_unsafe"]

#: What ``safe=True`` opens: files on a network, each by one request to a store. Whatever is not here is refused, since
#: fsspec has file systems that read local files, unpack archives, or read from what another URL names.
NETWORK_SCHEMES = frozenset(
    {"abfs", "abfss", "ais", "az", "ftp", "gcs", "gs", "hf", "http", "https", "s3", "s3a", "sftp"}
)
#: What runs or reads what is at this host, and is no file: a command, and standard input.
COMMANDS = ("pipe", "-")
#: Characters of a refused URL that the error shows.
SHOWN = 200


def refuse_unsafe(url: str) -> None:
    """Raise unless a URL names a file on a network.

    Raises:
        RefusedURLError: it is a path, a command or standard input; its scheme is not among `NETWORK_SCHEMES`, or has an
            opener of the user; or it is a chain of file systems.
    """
    scheme, _ = split_scheme(url)
    if scheme in COMMANDS:
        found = "a command" if scheme == "pipe" else "standard input"
    elif scheme == "":
        found = "a path of this host"
    elif scheme not in NETWORK_SCHEMES:
        found = f"of the scheme {scheme!r}"
    elif is_registered(scheme):
        found = f"of the scheme {scheme!r}, for which an opener was registered"
    elif "::" in url:
        found = "a chain of file systems"
    else:
        return
    raise RefusedURLError(
        f"{_redacted(url)} was refused: it is {found}. With safe=True nothing is opened but files on a network, of the "
        f"schemes {', '.join(sorted(NETWORK_SCHEMES))}"
    )


def refuse_commands(url: str, origin: str) -> None:
    """Raise if a URL from a remote file is a command or standard input.

    Args:
        url: what stands there, or what it became by rules and variables.
        origin: the file in which it stands, a path or a URL.

    Raises:
        RefusedURLError: it is.
    """
    scheme, _ = split_scheme(url)
    if scheme in COMMANDS and local_path(origin) is None:
        found = "a command" if scheme == "pipe" else "standard input"
        raise RefusedURLError(
            f"{_redacted(url)} was refused: it is {found}, and stands in {redact(origin)}, which is no file of this "
            f"host. If you trust the author of that file to run commands here, pass allow_commands=True"
        )


def _redacted(url: str) -> str:
    text = redact(url)
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
