"""Which fields a decoder takes: those whose name ends in one of its extensions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["ByExtension", "ExtensionDecoder", "handle_extension", "split_extensions"]


def split_extensions(extensions: str | Iterable[str]) -> tuple[str, ...]:
    """Return the extensions of a string with blanks between them, or of several strings, in lower case.

    >>> split_extensions("jpg seg.PNG"), split_extensions([".jpg"])
    (('jpg', 'seg.png'), ('jpg',))
    """
    words = extensions.split() if isinstance(extensions, str) else list(extensions)
    result = tuple(word.lower().lstrip(".") for word in words)
    if not result or "" in result:
        raise ValueError(f'extensions are words such as "jpg seg.png", at least one, not {extensions!r}')
    for extension in result:
        if extension == "gz" or extension.endswith(".gz"):
            raise ValueError(
                f"no decoder is asked for {extension!r}: fields are decompressed first, and then decoded by the rest "
                f"of their name. Leave the .gz out; only= keeps a field compressed"
            )
    return result


class ByExtension(ABC):
    """A decoder that knows by a field's name alone whether it decodes it.

    That is asked once for each name of a field, not for each sample. Called as ``decoder(field, data)``, it returns
    ``None`` for the fields that it does not take, as any decoder does.

    Args:
        extensions: words that the name must end in, whole parts between dots: ``"seg.png"`` takes ``seg.png`` and
            ``left.seg.png``, but neither ``png`` nor ``oldseg.png``. Upper and lower case are the same.
    """

    def __init__(self, extensions: str | Iterable[str]) -> None:
        self.extensions = split_extensions(extensions)

    def takes(self, field: str) -> bool:
        """Whether it decodes the fields of that name."""
        name = "." + field.lower()
        return any(name.endswith("." + extension) for extension in self.extensions)

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Return the value; ``None`` leaves the field to the next decoder."""

    def __call__(self, field: str, data: bytes) -> Any:
        """Return the value, or ``None`` for a field that it does not take."""
        return self.decode(data) if self.takes(field) else None


class ExtensionDecoder(ByExtension):
    """A function ``bytes -> value`` for some extensions, as `handle_extension` makes it."""

    def __init__(self, extensions: str | Iterable[str], function: Callable[[bytes], Any]) -> None:
        super().__init__(extensions)
        if not callable(function):
            raise TypeError(f"what decodes {' '.join(self.extensions)} is a function of bytes, not {function!r}")
        self.function = function

    def decode(self, data: bytes) -> Any:
        """Return what the function returns."""
        return self.function(data)

    def __repr__(self) -> str:
        return f"{name_of(self.function)} (for {' '.join(self.extensions)})"


def handle_extension(extensions: str | Iterable[str], function: Callable[[bytes], Any]) -> ExtensionDecoder:
    """Make a decoder of a function ``bytes -> value``, for the fields whose name ends in one of the extensions.

    Examples:
        >>> upper = handle_extension("txt cap.en", lambda data: data.decode().upper())
        >>> upper("txt", b"a"), upper("left.TXT", b"b"), upper("cap.en", b"c"), upper("en", b"d")
        ('A', 'B', 'C', None)
    """
    return ExtensionDecoder(extensions, function)


def name_of(function: object) -> str:
    """What to call a function in a message: its name and module, or how it prints itself."""
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{getattr(function, '__module__', None) or 'builtins'}.{name}"
