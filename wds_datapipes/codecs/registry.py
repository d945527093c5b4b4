"""Registry of decoders by name: image specs, media and those that users register."""

from __future__ import annotations

from difflib import get_close_matches

from wds_datapipes.codecs.extensions import ByExtension, ExtensionDecoder, name_of

__all__ = ["add_decoder", "find_decoder"]

#: The registered decoders by name, global like torch's registry of stages.
_registered: dict[str, ExtensionDecoder] = {}


def find_decoder(name: str) -> ByExtension:
    """Return the decoder for an image spec, ``"torch_video"``, ``"torch_audio"`` or a registered name.

    Raises:
        ValueError: there is no decoder of this name.
    """
    if name in _registered:
        return _registered[name]
    # Pillow would take most of the time to import the codecs.
    from wds_datapipes.codecs.images import IMAGE_SPECS, ImageDecoder

    if name in IMAGE_SPECS:
        return ImageDecoder(name)
    from wds_datapipes.codecs.media import AudioDecoder, VideoDecoder

    if name == "torch_video":
        return VideoDecoder()
    if name == "torch_audio":
        return AudioDecoder()
    names = [*IMAGE_SPECS, "torch_video", "torch_audio", *_registered]
    close = get_close_matches(name, names, 1)
    advice = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"there is no decoder {name!r}.{advice} Choose an image spec ({' '.join(IMAGE_SPECS)}), torch_video, "
        f"torch_audio, or a registered decoder: {' '.join(sorted(_registered)) or '(none yet)'}"
    )


def add_decoder(name: str, decoder: ExtensionDecoder) -> None:
    """Register a decoder; registering the same function again, as when a notebook cell is rerun, replaces it.

    Raises:
        ValueError: the name is taken by another decoder.
    """
    if name in _registered and _definition(_registered[name].function) != _definition(decoder.function):
        raise ValueError(
            f"the decoder name {name!r} is already registered for {name_of(_registered[name].function)}: "
            f"choose another name for {name_of(decoder.function)}"
        )
    if name not in _registered and _is_built_in(name):
        raise ValueError(f"the decoder name {name!r} is built in: choose another name")
    _registered[name] = decoder


def _is_built_in(name: str) -> bool:
    try:
        find_decoder(name)
    except ValueError:
        return False
    return True


def _definition(function: object) -> tuple[object, object]:
    """Return the module and name of a function, which stay the same when its definition is rerun."""
    return getattr(function, "__module__", None), getattr(function, "__qualname__", function)
