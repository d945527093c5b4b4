"""A function of the user's own, by its name, and options of what encodes its values."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.codecs.encoding import EncoderChain

__all__ = ["decoders_of", "encoders_of", "function_named"]

#: The word for the decoders of the basic table alone.
BASIC = "basic"
#: How an image is to be encoded: ``jpg:quality=90,optimize=true``.
ENCODING = re.compile(r"([\w.]+):(\w+=[^,]+(?:,\w+=[^,]+)*)")


def function_named(reference: str) -> Callable[..., Any]:
    """Import a function, also from a module in the current folder.

    An error in the module itself is raised as it is, with its traceback.

    >>> function_named("os.path:basename")("a/b")
    'b'

    Args:
        reference: ``module:function``, or ``package.module:Class.method``.

    Raises:
        WrongUse: there is no such module or function.
    """
    module_name, _, path = reference.partition(":")
    if not path or not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise WrongUse(f"--function is MODULE:FUNCTION, as in convert:smaller, not {reference!r}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for python -m
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and needs one that is not
        raise WrongUse(f"There is no module {error.name!r}, neither installed nor in {folder}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            name = getattr(found, "__name__", reference)
            raise WrongUse(f"{name!r} ({getattr(found, '__file__', 'no file')}) has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise WrongUse(f"{reference!r} is no function, but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def decoders_of(words: list[str] | None) -> list[str] | None:
    """Return the words for decoders of what a function gets, none of which is for the basic table alone.

    Raises:
        WrongUse: there is no such decoder.
    """
    if words is None:
        return None
    chosen = [word for word in words if word != BASIC]
    try:
        DecoderChain(chosen, {})
    except ValueError as error:
        raise WrongUse(f"--decode: {error}") from None
    return chosen


def encoders_of(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return options of image formats by the extensions of fields.

    >>> encoders_of(["jpg:quality=90,optimize=true", "webp:method=6"])
    {'jpg': {'quality': 90, 'optimize': True}, 'webp': {'method': 6}}

    Raises:
        WrongUse: a text tells no options, or they are not those of an image format.
    """
    encoders = {}
    for text in texts:
        match = ENCODING.fullmatch(text)
        if match is None:
            raise WrongUse(f"--encode is EXT:OPTION=VALUE, as in jpg:quality=90, not {text!r}")
        pairs = (pair.partition("=")[::2] for pair in match[2].split(","))
        encoders[match[1]] = {name: _value(value) for name, value in pairs}
    try:
        EncoderChain(encoders)
    except (TypeError, ValueError) as error:
        raise WrongUse(f"--encode: {error}") from None
    return encoders


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
