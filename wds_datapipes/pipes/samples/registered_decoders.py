"""Stages for decoders of users: `register_decoder`."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from wds_datapipes.arguments import checks_calls
from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.codecs.extensions import (
    find_decoder,
    handle_extension,
    name_of,
    registered_decoders,
    split_extensions,
)
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    pass
from wds_datapipes.pipes.samples.decoding import DecodingStage, decode_samples

F = TypeVar("F", bound=Callable[..., Any])


class RegisteredDecoder(DecodingStage[Sample]):
    """The stage for a function registered with `register_decoder`: it decodes the fields with its extensions."""

    draws_globally = True
    function = staticmethod(decode_samples)


@checks_calls
def register_decoder(name: str, extensions: str | Iterable[str]) -> Callable[[F], F]:
    """Register a function ``bytes -> value`` as a stage, and as a decoder of ``wds_decode``; used as a decorator.

    Every datapipe gets a method ``.name()``, which decodes the fields with these extensions and leaves all others
    unchanged. It takes ``only``, ``partial`` and ``on_error``, like ``wds_decode``, and passes other keywords to the
    function. ``.wds_decode("name")`` combines it with other decoders. Registering the same function again, as when a
    notebook cell is rerun, replaces it.

    Args:
        name: the name of the stage: a Python identifier that is not a method of datapipes.
        extensions: as for `handle_extension`: ``"jpg seg.png"`` or a list of such words.

    Raises:
        ValueError: the name is invalid or taken.

    Examples:
        >>> @register_decoder("reversed_text", "rev")
        ... def reversed_text(data, encoding="utf-8"):
        ...     return data.decode(encoding)[::-1]
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"rev": b"olleh", "cls": b"7"}]).reversed_text(encoding="ascii"))
        [{'rev': 'hello', 'cls': b'7'}]
        >>> list(IterableWrapper([{"rev": b"olleh", "cls": b"7"}]).wds_decode("reversed_text"))
        [{'rev': 'hello', 'cls': 7}]
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise ValueError(f"the name of a stage must be a valid method name, such as 'sketch', not {name!r}")
    words = split_extensions(extensions)

    def register(function: F) -> F:
        known = registered_decoders.get(name)
        if known is None:
            is_taken = hasattr(IterDataPipe, name) or name in IterDataPipe.functions or _is_decoder(name)
        else:
            is_taken = name_of(known.function) != name_of(function)
        if is_taken:
            raise ValueError(
                f"the name {name!r} is taken by a method or stage of datapipes, or by another decoder: choose another "
                f"name for {name_of(function)}"
            )

        def build(
            source: IterDataPipe[Sample],
            /,
            *,
            only: str | Iterable[str] | None = None,
            partial: bool = False,
            on_error: OnError = "raise",
            **arguments: Any,
        ) -> RegisteredDecoder:
            decode = functools.partial(function, **arguments) if arguments else function
            chain = DecoderChain([handle_extension(words, decode)], {}, only=only, partial=partial, basic=False)
            return RegisteredDecoder(source, chain=chain, on_error=on_error)

        build.__doc__ = function.__doc__
        registered_decoders[name] = handle_extension(words, function)
        IterDataPipe.register_function(name, build)
        return function

    return register


def _is_decoder(name: str) -> bool:
    try:
        find_decoder(name)
    except ValueError:
        return False
    return True
