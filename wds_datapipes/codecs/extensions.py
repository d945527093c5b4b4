"""Decoders by extension and by name, and the field names passed to decoder functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from random import Random
from typing import Any

from wds_datapipes.arguments import checks_calls
from wds_datapipes.io.read_limits import ReadLimits

#: The decoders that `register_decoder` has registered, by name.
registered_decoders: dict[str, ExtensionDecoder] = {}


class FieldName(str):
    """The name of a field as passed to decoder functions: ``png``, which also matches ``.png``.

    webdataset passes ``.png``, and decoders written for it check ``key.endswith(".png")``. This check works here as
    well, for every complete extension; otherwise, the class behaves like a plain string.

    Examples:
        >>> name = FieldName("seg.png")
        >>> name.endswith(".png"), name.endswith(".seg.png"), name.endswith(".g"), name == "seg.png"
        (True, True, False, True)
    """

    __slots__ = ()

    def endswith(self, suffix: str | tuple[str, ...], *span: Any) -> bool:
        """Whether the name ends in a suffix; a leading dot in the suffix also matches the start of the name."""
        if super().endswith(suffix, *span):
            return True
        suffixes = suffix if isinstance(suffix, tuple) else (suffix,)
        return not span and any(one[:1] == "." and self == one[1:] for one in suffixes)

    def lower(self) -> FieldName:
        """Return the name in lower case."""
        return FieldName(super().lower())


@dataclass(frozen=True)
class Continue:
    """An intermediate result of a decoder: the next decoders continue with this name and data.

    Decoders that only remove a layer, such as a compression, return it. The field keeps its name in the sample.

    Args:
        key: the name that selects the next decoder.
        data: the bytes to decode.

    Examples:
        >>> import zlib
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> def inflate(field, data):
        ...     return Continue(field[:-2], zlib.decompress(data)) if field.endswith(".z") else None
        >>> samples = IterableWrapper([{"__key__": "a", "cls.z": zlib.compress(b"7")}])
        >>> list(samples.wds_decode(inflate))
        [{'__key__': 'a', 'cls.z': 7}]
    """

    key: str
    data: bytes


def as_continue(value: object) -> Continue | None:
    """Convert a `Continue` of this package or webdataset; return ``None`` for any other value.

    webdataset's class is recognized by name, so webdataset need not be imported, and copies of the class work, too.
    """
    if type(value).__name__ != "Continue":
        return None
    key, data = getattr(value, "key", None), getattr(value, "data", None)
    if not isinstance(key, str):
        return None
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"Continue({key!r}, ...) must hold the bytes to decode next, not a {type(data).__name__}")
    return Continue(key.removeprefix("."), bytes(data))


def split_extensions(extensions: str | Iterable[str]) -> tuple[str, ...]:
    """Return the extensions of a space-separated string, or of several strings, in lower case.

    >>> split_extensions("jpg seg.PNG"), split_extensions([".jpg"])
    (('jpg', 'seg.png'), ('jpg',))
    """
    words = extensions.split() if isinstance(extensions, str) else list(extensions)
    if not all(isinstance(word, str) for word in words):
        raise TypeError(f'extensions must be one or more words such as "jpg seg.png", not {extensions!r:.200}')
    result = tuple(word.lower().lstrip(".") for word in words)
    if not result or "" in result:
        raise ValueError(f'extensions must be one or more words such as "jpg seg.png", not {extensions!r}')
    for extension in result:
        if extension == "gz" or extension.endswith(".gz"):
            raise ValueError(
                f"{extension!r} does not select a decoder: fields are decompressed first, and then decoded by the rest "
                f"of their name. Remove the .gz; only= keeps a field compressed"
            )
    return result


class ByExtension(ABC):
    """A decoder selected by the name of a field, once per name instead of per sample.

    When called as ``decoder(field, data)``, it returns ``None`` for other fields, as any decoder does.

    Args:
        extensions: extensions of the name, compared by complete parts between dots: ``"seg.png"`` matches ``seg.png``
            and ``left.seg.png``, but not ``png`` or ``oldseg.png``. Case is ignored.
    """

    def __init__(self, extensions: str | Iterable[str]) -> None:
        self.extensions = split_extensions(extensions)

    def takes(self, field: str) -> bool:
        """Whether this decodes fields of the name."""
        name = "." + field.lower()
        return any(name.endswith("." + extension) for extension in self.extensions)

    #: Whether it draws random numbers.
    is_random: bool = False

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Return the value; ``None`` leaves the field to the next decoder."""

    def with_rng(self, make_rng: Callable[[], Random]) -> ByExtension:  # noqa: ARG002 - for those that draw
        """Return a decoder that uses a new generator for each field."""
        return self

    def with_limits(self, limits: ReadLimits) -> ByExtension:  # noqa: ARG002 - for those that have some
        """Return a decoder that observes the limits."""
        return self

    def __call__(self, field: str, data: bytes) -> Any:
        """Return the value, or ``None`` for a field with another extension."""
        return self.decode(data) if self.takes(field) else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ExtensionDecoder(ByExtension):
    """A function ``bytes -> value`` for some extensions; see `handle_extension`."""

    def __init__(self, extensions: str | Iterable[str], function: Callable[[bytes], Any]) -> None:
        super().__init__(extensions)
        if not callable(function):
            raise TypeError(f"the decoder of {' '.join(self.extensions)} must be a function of bytes, not {function!r}")
        self.function = function

    def decode(self, data: bytes) -> Any:
        """Call the function."""
        return self.function(data)

    def __repr__(self) -> str:
        return f"{name_of(self.function)} (for {' '.join(self.extensions)})"


@checks_calls
def handle_extension(extensions: str | Iterable[str], function: Callable[[bytes], Any]) -> ExtensionDecoder:
    """Make a decoder from a function ``bytes -> value`` for fields with one of the extensions.

    Examples:
        >>> upper = handle_extension("txt cap.en", lambda data: data.decode().upper())
        >>> upper("txt", b"a"), upper("left.TXT", b"b"), upper("cap.en", b"c"), upper("en", b"d")
        ('A', 'B', 'C', None)
    """
    return ExtensionDecoder(extensions, function)


def name_of(function: object) -> str:
    """Return the module and name of a function for messages, or its repr."""
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{getattr(function, '__module__', None) or 'builtins'}.{name}"


def find_decoder(name: str) -> ByExtension:
    """Return the decoder for an image spec, ``"torch_video"``, ``"torch_audio"`` or a registered name.

    Raises:
        ValueError: there is no decoder of this name.
    """
    # Imported here because Pillow takes most of the time that importing the codecs would need.
    from wds_datapipes.codecs.images import IMAGE_SPECS, ImageDecoder
    from wds_datapipes.codecs.media import AudioDecoder, VideoDecoder

    if name in IMAGE_SPECS:
        return ImageDecoder(name)
    media = {"torch_video": VideoDecoder, "torch_audio": AudioDecoder}
    if name in media:
        return media[name]()
    if name in registered_decoders:
        return registered_decoders[name]
    close = get_close_matches(name, [*IMAGE_SPECS, *media, *registered_decoders], 1)
    advice = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"there is no decoder {name!r}.{advice} Choose an image spec ({' '.join(IMAGE_SPECS)}), torch_video, "
        f"torch_audio, or a name registered with register_decoder"
    )
