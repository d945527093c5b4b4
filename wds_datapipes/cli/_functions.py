"""Load user functions by name, and parse the options for decoders and encoders."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.codecs.encoding import EncoderChain

__all__ = ["OWN", "Decode", "Function", "load_function", "parse_decoders", "parse_encoders"]

#: The help panel of options for functions.
OWN = {"rich_help_panel": "User function"}
Function: TypeAlias = Annotated[
    str,
    typer.Option(
        "--function",
        "-f",
        metavar="MODULE:FUNCTION",
        help="A function that maps a sample to a sample, None or several samples.",
        show_default=False,
        **OWN,
    ),
]
Decode: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--decode",
        "-d",
        metavar="WORD",
        help="Decode fields first: basic, or also images: pil, rgb8, torch ...; may be repeated.",
        **OWN,
    ),
]
#: Selects the basic decoders alone.
BASIC = "basic"
#: Options of an image format: ``jpg:quality=90,optimize=true``.
ENCODING = re.compile(r"([\w.]+):(\w+=[^,]+(?:,\w+=[^,]+)*)")


def load_function(reference: str, option: str = "--function") -> Callable[..., Any]:
    """Import a function; its module may be in the current folder.

    Errors in the module itself keep their traceback.

    >>> load_function("os.path:basename")("a/b")
    'b'

    Args:
        reference: ``module:function``, or ``package.module:Class.method``.
        option: the option that names it, for messages.

    Raises:
        WrongUse: the module or function does not exist.
    """
    module_name, _, path = reference.partition(":")
    if not path or not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise WrongUse(f"{option} must be MODULE:FUNCTION, as in convert:smaller, not {reference!r}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as python -m does
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        raise WrongUse(f"No module named {error.name!r}, neither installed nor in {folder}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            name = getattr(found, "__name__", reference)
            raise WrongUse(f"{name!r} ({getattr(found, '__file__', 'no file')}) has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise WrongUse(f"{reference!r} is not a function, but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def parse_decoders(words: list[str] | None) -> list[str] | None:
    """Parse --decode into the names of decoders; an empty list means the basic decoders alone.

    Raises:
        WrongUse: a decoder does not exist.
    """
    if words is None:
        return None
    names = [word for word in words if word != BASIC]
    try:
        DecoderChain(names, {})
    except ValueError as error:
        raise WrongUse(f"--decode: {error}") from None
    return names


def parse_encoders(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse --encode into options of image formats by field extension.

    >>> parse_encoders(["jpg:quality=90,optimize=true", "webp:method=6"])
    {'jpg': {'quality': 90, 'optimize': True}, 'webp': {'method': 6}}

    Raises:
        WrongUse: a text has no options, or an option is not supported.
    """
    encoders = {}
    for text in texts:
        match = ENCODING.fullmatch(text)
        if match is None:
            raise WrongUse(f"--encode must be EXT:OPTION=VALUE, as in jpg:quality=90, not {text!r}")
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
