"""Exceptions in transit from one process to another."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper

from wds_datapipes.loading.transport.serialization import takes

#: The exceptions that are sent to the main process instead of ending the worker: all errors, and groups of any kind.
SENDABLE: tuple[type[BaseException], ...]
#: The builtin classes of exception groups, if they exist: the general one, and that of errors only.
_GROUPS: tuple[type[BaseException], ...]
if sys.version_info >= (3, 11):
    from builtins import BaseExceptionGroup, ExceptionGroup

    SENDABLE, _GROUPS = (Exception, BaseExceptionGroup), (BaseExceptionGroup, ExceptionGroup)
else:
    SENDABLE, _GROUPS = (Exception,), ()

#: The maximum depth of nested groups that are sent as groups, as in tracebacks.
GROUP_DEPTH = 10


class SendableError(ExceptionWrapper):
    """An exception in transit to another process; its class is RuntimeError if its own cannot be pickled.

    The exceptions of a group are sent with it, so that ``except*`` finds them.

    Args:
        exc_info: the return value of ``sys.exc_info()``, or ``None`` for the exception that is being handled.
        where: where it was raised, as the end of the sentence "Caught ...".
        depth: the number of groups that contain the exception.
    """

    def __init__(self, exc_info: Any = None, where: str = "in background", depth: int = 0) -> None:
        exc_info = sys.exc_info() if exc_info is None else exc_info
        super().__init__(exc_info, where)  # type: ignore[no-untyped-call]
        error = exc_info[1]
        self._parts: list[SendableError] = []
        if isinstance(error, _GROUPS) and depth < GROUP_DEPTH:
            for each in error.exceptions:  # type: ignore[attr-defined]  # mypy takes them for plain exceptions
                self._parts.append(SendableError((type(each), each, each.__traceback__), where, depth + 1))
        if not takes(ForkingPickler.dumps, self.exc_type):
            self.exc_type: type[BaseException] = RuntimeError  # the text contains the name of the class

    def reraise(self) -> NoReturn:
        """Raise the exception again with all information in its message; or a RuntimeError with the same message."""
        text = f"Caught {self.exc_type.__name__} {self.where}.\nOriginal {self.exc_msg}"
        if self._parts:
            raise self._group(text)
        # A generator cannot raise StopIteration.
        if not issubclass(self.exc_type, (StopIteration, StopAsyncIteration)):
            try:
                super().reraise()  # type: ignore[no-untyped-call]
            except Exception as error:  # a user's class may raise if it is called with a message
                if type(error) is self.exc_type:
                    raise
        raise RuntimeError(text)

    def error(self) -> BaseException:
        """Return the exception that `reraise` raises."""
        try:
            self.reraise()
        except BaseException as error:  # noqa: BLE001 - it is the requested result
            return error

    def _group(self, text: str) -> BaseException:
        """Return a group of the exceptions of the parts: of its own class if possible, else of a builtin one."""
        errors = [part.error() for part in self._parts]
        general, of_errors = _GROUPS
        if issubclass(self.exc_type, general):
            with suppress(Exception):
                if type(group := self.exc_type(text, errors)) is self.exc_type:
                    return group
        return (of_errors if all(isinstance(error, Exception) for error in errors) else general)(text, errors)
