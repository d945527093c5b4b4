"""Errors of the commands: their exit codes, and their messages, on one line, without credentials, naming options."""

from __future__ import annotations

import re
import sys

from wds_datapipes.errors import MissingDependencyError, ShardOpenError, SpecError, UnknownSchemeError, UnsafeInputError
from wds_datapipes.hints import Message
from wds_datapipes.redaction import redact_text

#: Exit codes other than 0; the last two stand for Ctrl-C and a closed output pipe.
FAULT_FOUND, WRONG_USE, INTERRUPTED, UNREAD = 1, 2, 130, 141
#: Characters that would affect the terminal or the line: control characters, bytes that are not text, and characters
#: that change the direction of text, so that a name could be disguised.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: The options of the running command, used to translate advice.
available_options: set[str] = set()


class WrongUse(Exception):
    """The command line is invalid; the message says why and how to fix it."""


#: Errors that are fixed by changing the command line, not the data.
USER_ERRORS = (MissingDependencyError, SpecError, ShardOpenError, UnknownSchemeError, UnsafeInputError, WrongUse)


def exit_code_of(error: Exception) -> int:
    """Return the exit code for an error that ends a command."""
    return WRONG_USE if isinstance(error, USER_ERRORS) else FAULT_FOUND


def print_line(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr)  # noqa: T201  of a command


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Show a warning as one line, without its location in the code."""
    print_line(f"Warning: {on_one_line(str(message))}")


def printable(text: str) -> str:
    r"""Escape a name from an archive so that it can be printed on a line of a terminal.

    >>> printable("a\x1b[31m\n"), printable("Bär"), printable("a\u202eb")
    ('a\\x1b[31m\\x0a', 'Bär', 'a\\u202eb')
    """
    return UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def on_one_line(message: str) -> str:
    """Format a message for the command line, with hints as options of the running command.

    >>> from wds_datapipes.hints import END_MARKER
    >>> on_one_line(Message("It has no end marker. If it was written so, ", END_MARKER))
    'It has no end marker. If it was written so, in Python, pass end_marker="optional"'
    """
    return printable(redact_text(spelled(message)))


def spelled(message: str) -> str:
    """Return a message with its hints as options of the running command, or for Python if the command has none."""
    return message.spell(lambda hint: hint.as_option(available_options)) if isinstance(message, Message) else message


def message_of(error: Exception) -> str:
    r"""Return the original message of an error.

    An error from a worker includes its traceback there, and torch appends the stage.

    >>> message_of(ValueError("Caught ValueError in worker process 0.\nOriginal Traceback:\nValueError: odd\nThis ..."))
    'odd'
    """
    text = str(error)
    if isinstance(text, Message):
        return text
    raised = re.findall(rf"^(?:\w+\.)*{type(error).__name__}: (.+)$", text, flags=re.MULTILINE)
    return raised[-1] if raised else text.partition("\n")[0]
