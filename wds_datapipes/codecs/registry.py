"""Names of decoders, as in ``wds_decode("rgb8", "torch_audio", "sketch")``."""

from __future__ import annotations

from wds_datapipes.codecs.extensions import ByExtension, ExtensionDecoder, name_of

__all__ = ["find_word", "name_decoder"]

_named: dict[str, ExtensionDecoder] = {}


def find_word(word: str) -> ByExtension:
    """Return the decoder of an image spec, ``"torch_video"``, ``"torch_audio"``, or a name given by `name_decoder`."""
    if word in _named:
        return _named[word]
    from wds_datapipes.codecs.images import IMAGE_SPECS, ImageDecoder

    if word in IMAGE_SPECS:
        return ImageDecoder(word)
    from wds_datapipes.codecs.media import AudioDecoder, VideoDecoder

    if word == "torch_video":
        return VideoDecoder()
    if word == "torch_audio":
        return AudioDecoder()
    raise ValueError(
        f"no decoder is called {word!r}. There are the image specs {' '.join(IMAGE_SPECS)}; torch_video and "
        f"torch_audio; and the registered decoders {' '.join(sorted(_named)) or '(none yet)'}"
    )


def name_decoder(name: str, decoder: ExtensionDecoder) -> None:
    """Let a word stand for a decoder; the same function again, as when a notebook cell is run again, replaces it.

    Raises:
        ValueError: the word stands for another decoder.
    """
    if name in _named and _origin(_named[name].function) != _origin(decoder.function):
        raise ValueError(
            f"the decoder name {name!r} is registered already, for {name_of(_named[name].function)}: "
            f"choose another name for {name_of(decoder.function)}"
        )
    if name not in _named and _is_built_in(name):
        raise ValueError(f"the decoder name {name!r} is a word of wds_decode already: choose another name")
    _named[name] = decoder


def _is_built_in(word: str) -> bool:
    try:
        find_word(word)
    except ValueError:
        return False
    return True


def _origin(function: object) -> tuple[object, object]:
    """Where a function was written: equal for one that was defined again by running the same code again."""
    return getattr(function, "__module__", None), getattr(function, "__qualname__", function)
