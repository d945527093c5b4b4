"""Values of options: numbers, bytes, names with values, functions and decoders."""

from __future__ import annotations

import inspect
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from cyclopts import Parameter
from cyclopts.validators import Number

from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.errors import WdsError
from wds_datapipes.hints import Message
from wds_datapipes.tools.cli.errors import WrongUse

#: Suffixes of a number of bytes with their factors.
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
#: Selects the basic decoders alone.
BASIC = "basic"
HAS_METAVARS = "metavar" in inspect.signature(Parameter).parameters


def metavar(name: str, **options: Any) -> Parameter:
    """Return a parameter whose value has this name on help pages; the cyclopts of Python 3.10 shows none."""
    return Parameter(**(options | {"metavar": name} if HAS_METAVARS else options))


Natural: TypeAlias = Annotated[int, metavar("NUMBER", validator=Number(gte=0))]
Positive: TypeAlias = Annotated[int, metavar("NUMBER", validator=Number(gte=1))]
#: Shells complete the names of files for it. It is always a string, since cyclopts tries the first type first.
if TYPE_CHECKING:
    FileOrUrl: TypeAlias = str
else:
    FileOrUrl = str | Path


@contextmanager
def wrong_use(prefix: str = "", *kinds: type[Exception]) -> Iterator[None]:
    """Raise `WrongUse` in place of a ValueError that is not of this package, or of an error of these kinds."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (ValueError, *kinds)) or (isinstance(error, WdsError) and type(error) not in kinds):
            raise
        reason = getattr(error, "strerror", None) or str(error.args[0] if isinstance(error, KeyError) else error)
        raise WrongUse(Message(prefix, reason)) from None  # not the name of a file


def parse_bytes(text: str, option: str) -> float:
    """Parse a number of bytes.

    >>> parse_bytes("500MB", "--maxsize"), parse_bytes("2 GiB", "--maxsize"), parse_bytes("1e9", "--maxsize")
    (500000000.0, 2147483648.0, 1000000000.0)
    """
    word = text.strip().lower().removesuffix("b")
    number = word.rstrip("kmgti ")
    try:
        size = float(number) * UNITS[word[len(number) :].strip()]
    except (KeyError, ValueError):
        raise WrongUse(f"{option} must be a number of bytes, such as 500MB, 2GiB or 1e9, not {text!r}") from None
    if not 0 < size < math.inf:
        raise WrongUse(f"{option} must be a positive number of bytes, not {text!r}")
    return size


def parse_pairs(texts: Sequence[str], pattern: str, rule: str) -> dict[str, str]:
    """Parse values such as NAME=VALUE, each name once.

    >>> parse_pairs(["train=9", "val=1"], "[^=]+", "--part must be NAME=SHARE")
    {'train': '9', 'val': '1'}

    Args:
        texts: the values of the option.
        pattern: matches a name.
        rule: what they must be, for the message.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not re.fullmatch(pattern, name) or not value or name in pairs:
            raise WrongUse(f"{rule}, not {text!r}")
        pairs[name] = value
    return pairs


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
    module, _, path = reference.partition(":")
    if not path:
        raise WrongUse(f"{option} must be MODULE:FUNCTION, as in convert:smaller, not {reference!r}")
    if module.endswith(".py") and Path(module).is_file():
        raise WrongUse(
            f"{option} names a module, not a file. In the folder of {module!r}, write {Path(module).stem}:{path}"
        )
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)  # as python -m does
    try:
        found: Any = pkgutil.resolve_name(reference)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        raise WrongUse(f"No module named {error.name!r}, neither installed nor in {folder}") from None
    except (AttributeError, ValueError) as error:
        raise WrongUse(f"There is no {reference!r}: {error}") from None
    if not callable(found):
        raise WrongUse(f"{reference!r} is not a function, but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def load_builder(reference: str, option: str) -> Callable[[], Any]:
    """Import a function that is called without arguments, such as one that builds a pipeline.

    Raises:
        WrongUse: the module or function does not exist, or the function takes arguments.
    """
    build = load_function(reference, option)
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise WrongUse(
            f"{option} must be a function without arguments, but {reference!r} takes some: {error}"
        ) from None
    except ValueError:  # the signature of a function in C may be unknown
        pass
    return build


def parse_decoders(words: list[str] | None) -> list[str] | None:
    """Parse --decode into the names of decoders; an empty list means the basic decoders alone.

    Raises:
        WrongUse: a decoder does not exist.
    """
    if words is None:
        return None
    names = [word for word in words if word != BASIC]
    with wrong_use("--decode: "):
        DecoderChain(names, {})
    return names
