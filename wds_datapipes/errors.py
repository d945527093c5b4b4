"""Exceptions that this package raises.

::

    WdsError
    ├── SpecError (ValueError)                   a shard pattern or a dataset specification is wrong, or matches nothing
    ├── UnknownSchemeError (ValueError)          no opener or file system handles the scheme of a URL
    ├── UnsafeInputError (ValueError)            input could run code or read a local file without permission
    ├── MissingDependencyError (ImportError)     an optional package is required but not installed
    ├── ShardError                               one shard cannot be read to its end
    │   ├── ShardOpenError (OSError)             it could not be opened
    │   ├── ShardReadError (OSError)             its disk, store, network or ``pipe:`` command failed in the middle
    │   ├── TruncatedShardError (EOFError)       it ends too early
    │   ├── CorruptShardError (ValueError)       it is damaged, or has another format
    │   ├── UnsupportedMemberError (ValueError)  it holds a member that cannot be read faithfully, such as a sparse file
    │   ├── ReadLimitError (ValueError)          it exceeds `ReadLimits`
    │   └── ChangedShardError (ValueError)       it has changed since it was opened or a state saved
    ├── SampleError                              one sample cannot be used
    │   ├── DuplicateKeyError (ValueError)       a field occurs twice in a sample, or a key twice in a shard
    │   ├── MissingFieldError (ValueError)       a field, or the entry of a table for the sample, is missing
    │   ├── SampleSizeError (ValueError)         its length is not a number, or exceeds that of a batch or a row
    │   ├── DecodeError (ValueError)             a field or a record is not what its name says
    │   ├── EncodeError (ValueError)             it cannot be written so that it reads back unchanged
    │   └── SampleSourceError (ValueError)       its source cannot be read, or the command that makes it failed
    ├── ShardWriteError (OSError)                a shard could not be written; no file with its name exists
    ├── ConversionError (RuntimeError)           some shards could not be converted; the others were
    ├── MisalignedShardsError (ValueError)       samples have no counterpart in a joined dataset
    ├── EmptySourceError (ValueError)            the source of a stage yields no item
    ├── StateError (ValueError)                  a state cannot be saved or loaded
    ├── SidecarError                             a file that describes a shard or a dataset cannot be used
    │   ├── MissingSidecarError (OSError)        it cannot be opened, or cannot be written
    │   ├── CorruptSidecarError (ValueError)     it is damaged, or is something else
    │   ├── StaleSidecarError (ValueError)       it does not match its shards, or they have changed since it was written
    │   └── UnsupportedSidecarError (ValueError) its format does not support the request
    ├── ErrorBudgetError (RuntimeError)          a stage has skipped more items than allowed
    ├── CacheError (RuntimeError)                a cache cannot be written, is damaged, or belongs to another pipeline
    ├── WorkerDiedError (RuntimeError)           a worker process ended without a result
    ├── WorkerTimeoutError (TimeoutError)        a worker process has sent nothing within its timeout
    └── RankLostError (RuntimeError)             another rank of a distributed run has failed, left, or is silent

Each error takes a single message that contains all facts: when an exception crosses a process boundary, torch rebuilds
it from its message alone, and turns classes with more arguments into a bare ``RuntimeError``. The message is given in
parts, so that its ``Hint`` objects can be spelled for the function or the command that the user called.
"""

from wds_datapipes.hints import Hint, Message
from wds_datapipes.redaction import redact_text


def text_of(error: BaseException) -> str:
    """Return the message of an error; that of a user's class may raise another error."""
    try:
        return str(error)
    except Exception as raised:  # noqa: BLE001  it may raise anything
        return f"it has no message: its __str__ raised {type(raised).__name__}"


def cause_of(error: BaseException) -> Message:
    """Return the class and the message of an error, without a period at its end.

    >>> cause_of(ValueError("The data are odd."))
    'ValueError: The data are odd'
    """
    text = text_of(error)
    return Message(f"{type(error).__name__}: ", text if isinstance(text, Message) else text.rstrip("."))


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Format a count with its noun, for messages.

    >>> plural(1, "shard"), plural(1200, "shard"), plural(2, "copy", "copies")
    ('1 shard', '1,200 shards', '2 copies')
    """
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


class WdsError(Exception):
    """The base class of all exceptions of this package. Its message contains no credentials.

    Args:
        message: the parts of the message: texts, hints and other messages.
    """

    def __init__(self, *message: object) -> None:
        if len(message) > 1 or any(isinstance(part, Message | Hint) for part in message):
            whole = message[0] if len(message) == 1 else None
            message = ((whole if isinstance(whole, Message) else Message(*message)).replaced(redact_text),)
        super().__init__(*(redact_text(part) if type(part) is str else part for part in message))

    @property
    def hints(self) -> tuple[Hint, ...]:
        """The advice in the message; empty for a copy from a worker process of PyTorch's ``DataLoader``."""
        message = self.args[0] if self.args else ""
        return message.hints if isinstance(message, Message) else ()


class SpecError(WdsError, ValueError):
    """A shard pattern or a dataset specification is wrong, or matches nothing."""


class UnknownSchemeError(WdsError, ValueError):
    """No opener or file system handles the scheme of a URL."""


class UnsafeInputError(WdsError, ValueError):
    """Untrusted input could run code, or names a local file or a command, without permission."""


class MissingDependencyError(WdsError, ImportError):
    """An optional package is required but not installed."""


class ShardError(WdsError):
    """A shard cannot be read to its end.

    Attributes:
        concerns_all: whether other shards will fail in the same way, for example because credentials are rejected. No
            ``on_error`` policy skips such an error. Copies of the error in other processes lose this flag.
    """

    concerns_all = False


class ShardOpenError(ShardError, OSError):
    """A shard could not be opened."""


class ShardReadError(ShardError, OSError):
    """The disk, the store, the network or the ``pipe:`` command failed while reading a shard."""


class TruncatedShardError(ShardError, EOFError):
    """A shard ends before its end marker, or in the middle of a member or a record."""


class CorruptShardError(ShardError, ValueError):
    """A shard holds bytes that are not a tar archive, or not records of its format."""


class UnsupportedMemberError(ShardError, ValueError):
    """A shard holds a member that cannot be read faithfully."""


class ReadLimitError(ShardError, ValueError):
    """A shard exceeds `ReadLimits`."""


class ChangedShardError(ShardError, ValueError):
    """A shard has changed since it was opened, or since a state was saved."""


class SampleError(WdsError):
    """A sample cannot be used."""


class DuplicateKeyError(SampleError, ValueError):
    """A field occurs twice in a sample, or a key occurs again after other samples of its shard."""


class MissingFieldError(SampleError, ValueError):
    """A sample lacks a field that was requested, or a table has no entry for its key."""


class SampleSizeError(SampleError, ValueError):
    """The length of a sample is not a number, or exceeds what a batch or a row can hold; or a planned row lacks one."""


class DecodeError(SampleError, ValueError):
    """A field or a record cannot be decoded as its name says."""


class EncodeError(SampleError, ValueError):
    """A sample cannot be written so that it reads back unchanged: a value, a field name or the key is unsuitable."""


class SampleSourceError(SampleError, ValueError):
    """The source of a sample cannot be read, or the command or function that makes it failed."""


class ShardWriteError(WdsError, OSError):
    """A shard could not be written; no file with its name exists."""


class ConversionError(WdsError, RuntimeError):
    """Some shards could not be converted; the others were converted.

    Attributes:
        failures: the last error of each failed shard, by the URL of the source shard, without
            credentials.
    """

    def __init__(self, *message: object) -> None:
        super().__init__(*message)
        self.failures: dict[str, BaseException] = {}


class MisalignedShardsError(WdsError, ValueError):
    """Samples have no counterpart in a joined dataset."""


class EmptySourceError(WdsError, ValueError):
    """The source of a stage yields no items."""


class StateError(WdsError, ValueError):
    """The state of a pipeline cannot be saved, or does not fit the pipeline."""


class SidecarError(WdsError):
    """A file that describes a shard or a dataset cannot be used."""


class MissingSidecarError(SidecarError, OSError):
    """An index, a manifest, a quarantine file or a log of positions cannot be opened or written."""


class CorruptSidecarError(SidecarError, ValueError):
    """An index or a manifest is damaged, or has another format."""


class StaleSidecarError(SidecarError, ValueError):
    """An index or a manifest does not match its shards, or they have changed since it was written."""


class UnsupportedSidecarError(SidecarError, ValueError):
    """The format of an index cannot describe the shard, or does not support the request."""


class ErrorBudgetError(WdsError, RuntimeError):
    """A stage has skipped more items than its `ErrorBudget` allows."""


class CacheError(WdsError, RuntimeError):
    """A cache of samples cannot be written, is damaged, or belongs to another pipeline."""


class WorkerDiedError(WdsError, RuntimeError):
    """A worker process ended without sending a result or an error."""


class WorkerTimeoutError(WdsError, TimeoutError):
    """A worker process has sent nothing within its timeout."""


class RankLostError(WdsError, RuntimeError):
    """Another rank of a distributed run has failed, has exited, or does not respond."""
