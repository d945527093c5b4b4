"""Short texts of values for messages: small plain values in full, others by name and fingerprint."""

from __future__ import annotations

import functools
import reprlib
from itertools import chain
from typing import Any

from wds_datapipes.fingerprint.code import arguments_of, is_constant, is_opaque, is_secret, is_users, short_name
from wds_datapipes.fingerprint.values import Fingerprint
from wds_datapipes.redaction import redact, redact_text

__all__ = ["format_value"]

#: Replaces omitted parts.
CUT = "..."


def format_value(value: Any, without: tuple[type, ...] = ()) -> str:
    """Return a short text that identifies a value: small and plain values in full, others with a fingerprint.

    Strings inside of users' objects and functions are hidden, since they may be credentials.

    Args:
        value: the value.
        without: classes whose objects are excluded.

    >>> format_value("jpg;png"), format_value(["jpg", 3]), format_value(len)[:5]
    ("'jpg;png'", "['jpg', 3]", 'len #')
    """
    if callable(own := getattr(value, "fingerprint", None)) and not isinstance(value, type):
        return str(own())
    text = _Text(without).repr(value)
    if CUT not in text and _is_plain(value):
        return text
    found = Fingerprint(without)
    found.add(value)
    return f"{text} #{found.hexdigest()[:12]}"


class _Text(reprlib.Repr):
    """A `reprlib.Repr` that shortens values and hides secrets."""

    def __init__(self, without: tuple[type, ...]) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = 8
        self.maxstring = 60
        self._without = without
        self._hides_strings = False

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, str | bytes):
            if self._hides_strings or len(x) > self.maxstring:
                return CUT
            return repr(redact(x)) if isinstance(x, str) else redact_text(repr(x))
        if is_constant(x) and not isinstance(x, tuple | frozenset):
            return repr(x)
        if type(x) in (list, tuple, dict):
            if len(x) > self.maxlist:
                return f"{type(x).__name__} of {len(x)}{CUT}"
            if type(x) is dict:
                x = {key: value for key, value in x.items() if not (isinstance(key, str) and is_secret(key))}
            return super().repr1(x, level)
        if isinstance(x, functools.partial):
            return self._call("partial", (x.func, *x.args), x.keywords, level, hides=True)
        if isinstance(name := getattr(x, "__qualname__", None), str):
            return short_name(name)
        kind = type(x)
        arguments = arguments_of(x)
        is_ours = not is_users(kind.__module__) and not is_opaque(kind)
        if arguments is None and is_ours and not isinstance(x, list | tuple | dict | set | frozenset):
            arguments = {key: value for key, value in getattr(x, "__dict__", {}).items() if key[:1] != "_"}
        if not arguments:
            return f"{kind.__name__}({CUT})"
        return self._call(kind.__name__, (), arguments, level, hides=not is_ours)

    def _call(self, name: str, values: tuple[Any, ...], named: dict[str, Any], level: int, *, hides: bool) -> str:
        """Return the text of a call with its arguments."""
        before, self._hides_strings = self._hides_strings, self._hides_strings or hides
        try:
            if level <= 0 or len(values) + len(named) > self.maxlist:
                return f"{name}({CUT})"
            texts = [self.repr1(value, level - 1) for value in values]
            texts += [
                f"{key}={self.repr1(value, level - 1)}" for key, value in named.items() if self._counts(key, value)
            ]
            return f"{name}({', '.join(texts)})"
        finally:
            self._hides_strings = before

    def _counts(self, name: str, value: Any) -> bool:
        return not (is_secret(name) or isinstance(value, self._without))


def _is_plain(value: Any) -> bool:
    """Whether a value, or everything in a small collection, is plain and not a credential."""
    if type(value) is dict:
        return not any(map(is_secret, map(str, value))) and is_constant(tuple(chain.from_iterable(value.items())))
    return is_constant(tuple(value)) if type(value) is list else is_constant(value) or _is_named(value)


def _is_named(value: Any) -> bool:
    """Whether a value is identified by its name, as a class of a library is."""
    return isinstance(value, type) and not is_users(value.__module__)
