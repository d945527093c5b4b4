"""Kinds of files that come in place of a shard, such as pointers of Git LFS and error pages, for messages."""

from __future__ import annotations

#: The length of the beginning that shows the kind, in bytes.
BEGINNING = 200

_POINTER = b"version https://git-lfs.github.com/spec/"
_KINDS = {
    b"PK\x03\x04": "a ZIP archive",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
}
_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<error")


def describe_kind(data: bytes, *, may_be_text: bool = False) -> str:
    """Return a sentence about a file of another kind than expected, by its first `BEGINNING` bytes; "" if unknown.

    Args:
        data: the file, or its beginning.
        may_be_text: whether JSON and plain text are expected, so that they are no explanation.

    Examples:
        >>> describe_kind(b"version https://git-lfs.github.com/spec/v1")[:32]
        'It is a pointer of Git LFS, not '
        >>> describe_kind(b"<html><body>404 Not Found</body></html>")
        "It is a page of a web server, such as an error page: '<html><body>404 Not Found</body></html>'"
    """
    data = bytes(data[:BEGINNING])
    if data.startswith(_POINTER):
        return "It is a pointer of Git LFS, not the file: fetch the file with git lfs pull"
    if data.lstrip().lower().startswith(_PAGES):
        return f"It is a page of a web server, such as an error page: {_text(data)}"
    found = next((kind for start, kind in _KINDS.items() if data.startswith(start)), "")
    if found:
        return f"It is {found}"
    if may_be_text or not data or not _is_text(data):
        return ""
    what = "JSON, such as the error of a store" if data.lstrip()[:1] == b"{" else "text"
    return f"It is {what}: {_text(data)}"


def _is_text(data: bytes) -> bool:
    return all(31 < byte < 127 or byte in b"\t\n\r" for byte in data)


def _text(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace"))
