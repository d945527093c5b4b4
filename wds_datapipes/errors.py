"""Exceptions that this package raises.

    WdsError
    ├── PatternError (ValueError)                a shard pattern that cannot be expanded, or matches nothing
    ├── SpecError (ValueError)                   a dataset specification that is wrong
    ├── UnknownSchemeError (ValueError)          a URL scheme that no opener and no file system handles
    ├── RefusedURLError (ValueError)             an untrusted URL that names a local file or a command
    ├── MissingDependencyError (ImportError)     an optional package is not installed
    ├── ShardError                               one shard cannot be read to its end
    │   ├── ShardOpenError (OSError)             it could not be opened
    │   ├── CommandError (OSError)               a ``pipe:`` command ended with an error
    │   ├── ShardReadError (OSError)             its disk, store or network failed in the middle
    │   ├── TruncatedShardError (EOFError)       it ends too early
    │   ├── CorruptShardError (ValueError)       it is no tar archive, or damaged
    │   ├── UnsupportedMemberError (ValueError)  it holds a member that cannot be read faithfully, such as a sparse file
    │   ├── ReadLimitError (ValueError)          it exceeds `ReadLimits`
    │   └── ChangedShardError (ValueError)       it has changed since it was opened or a state saved
    ├── SampleError                              one sample cannot be used
    │   ├── DuplicateFieldError (ValueError)     a field occurs twice in one sample
    │   ├── RepeatedKeyError (ValueError)        a key is repeated after other samples of its shard
    │   ├── MissingFieldError (ValueError)       a field that was requested is missing
    │   ├── MissingEntryError (LookupError)      a table has no entry for its key
    │   ├── DecodeError (ValueError)             a field cannot be decoded as its name says
    │   │   └── UnsafeCodecError                 the field's codec can run code, and that was not allowed
    │   ├── EncodeError (ValueError)             a field cannot be encoded as its name says
    │   ├── SampleSourceError (ValueError)       its source cannot be read, or yields no sample
    │   ├── UnwritableSampleError (ValueError)   it would not be read back as it is
    │   └── SampleCommandError (OSError)         a shell command that maps samples has failed on it
    ├── ShardWriteError (OSError)                a shard could not be written; no file has its name
    ├── ConversionError (RuntimeError)           some shards could not be converted; the others were
    ├── MisalignedShardsError (ValueError)       parallel shards do not hold the same keys in the same order
    ├── EmptySourceError (ValueError)            the source of a stage yields no item
    ├── StateError (ValueError)                  a state cannot be saved or loaded
    ├── SidecarError                             a file that describes a shard or a dataset cannot be used
    │   ├── MissingSidecarError (OSError)        it cannot be opened, or cannot be written
    │   ├── CorruptSidecarError (ValueError)     it is damaged, or is something else
    │   ├── StaleSidecarError (ValueError)       the shards have changed since it was written
    │   ├── WrongSidecarError (ValueError)       it does not match its shard
    │   └── UnsupportedSidecarError (ValueError) its format does not support the request
    ├── ErrorBudgetError (RuntimeError)          a stage has skipped more items than allowed
    ├── CacheError (RuntimeError)                a cache cannot be written, is damaged, or belongs to another pipeline
    ├── WorkerDiedError (RuntimeError)           a worker process ended without a result
    ├── WorkerTimeoutError (TimeoutError)        a worker process has sent nothing within its time-out
    └── RankLostError (RuntimeError)             another rank of a distributed run has failed, left, or is silent

An error is built from one message, and the facts are in the message: torch rebuilds an exception that crosses a process
boundary from its message alone, and an error class with more arguments arrives there as a bare ``RuntimeError``.
"""

__all__ = [
    "CacheError",
    "ChangedShardError",
    "CommandError",
    "ConversionError",
    "CorruptShardError",
    "CorruptSidecarError",
    "DecodeError",
    "DuplicateFieldError",
    "EmptySourceError",
    "EncodeError",
    "ErrorBudgetError",
    "MisalignedShardsError",
    "MissingDependencyError",
    "MissingEntryError",
    "MissingFieldError",
    "MissingSidecarError",
    "PatternError",
    "RankLostError",
    "ReadLimitError",
    "RefusedURLError",
    "RepeatedKeyError",
    "SampleCommandError",
    "SampleError",
    "SampleSourceError",
    "ShardError",
    "ShardOpenError",
    "ShardReadError",
    "ShardWriteError",
    "SidecarError",
    "SpecError",
    "StaleSidecarError",
    "StateError",
    "TruncatedShardError",
    "UnknownSchemeError",
    "UnsafeCodecError",
    "UnsupportedMemberError",
    "UnsupportedSidecarError",
    "UnwritableSampleError",
    "WdsError",
    "WorkerDiedError",
    "WorkerTimeoutError",
    "WrongSidecarError",
]


class WdsError(Exception):
    """The base class of all exceptions of this package."""


class PatternError(WdsError, ValueError):
    """A shard pattern cannot be expanded, or nothing matches it."""


class SpecError(WdsError, ValueError):
    """A dataset specification cannot be read, or is wrong."""


class UnknownSchemeError(WdsError, ValueError):
    """No opener and no file system handles the scheme of a URL."""


class RefusedURLError(WdsError, ValueError):
    """A URL from an untrusted source names a local file or a command."""


class MissingDependencyError(WdsError, ImportError):
    """An optional package is needed and not installed."""


class ShardError(WdsError):
    """A shard cannot be read to its end.

    Attributes:
        concerns_all: whether others are sure to fail as well, as where credentials are not accepted. No ``on_error``
            skips such an error. A copy of the error in another process does not know.
    """

    concerns_all = False


class ShardOpenError(ShardError, OSError):
    """A shard could not be opened."""


class CommandError(ShardError, OSError):
    """A ``pipe:`` command ended with an error."""


class ShardReadError(ShardError, OSError):
    """The disk, the store or the network failed while a shard was being read."""


class TruncatedShardError(ShardError, EOFError):
    """A shard ends before its end marker, or in the middle of a member."""


class CorruptShardError(ShardError, ValueError):
    """A shard holds bytes that are not a tar archive."""


class UnsupportedMemberError(ShardError, ValueError):
    """A shard holds a member that cannot be read faithfully."""


class ReadLimitError(ShardError, ValueError):
    """A shard asks for more than `ReadLimits` allow."""


class ChangedShardError(ShardError, ValueError):
    """A shard has changed since it was opened, or since a state was saved."""


class SampleError(WdsError):
    """A sample cannot be used."""


class DuplicateFieldError(SampleError, ValueError):
    """A field occurs twice in one sample."""


class RepeatedKeyError(SampleError, ValueError):
    """A key is repeated after other samples of the same shard."""


class MissingFieldError(SampleError, ValueError):
    """A sample lacks a field that was requested."""


class MissingEntryError(SampleError, LookupError):
    """A table has no entry for the key of a sample."""


class DecodeError(SampleError, ValueError):
    """A field cannot be decoded as its name says."""


class EncodeError(SampleError, ValueError):
    """A field cannot be encoded as its name says, or no encoder takes it."""


class SampleSourceError(SampleError, ValueError):
    """The source of a sample cannot be read, has changed, or yields no sample."""


class UnsafeCodecError(DecodeError):
    """The codec of a field can run code, and that was not allowed."""


class UnwritableSampleError(SampleError, ValueError):
    """A sample would not be read back as it is: its key or a field name is ambiguous, or its key is taken."""


class SampleCommandError(SampleError, OSError):
    """A shell command has failed on a sample, timed out, or left no valid sample."""


class ShardWriteError(WdsError, OSError):
    """A shard could not be written; no file has its name."""


class ConversionError(WdsError, RuntimeError):
    """Some shards could not be converted; the others were.

    Attributes:
        failures: the last error of each, by the URL of the shard that was to be read.
    """

    def __init__(self, *message: object) -> None:
        super().__init__(*message)
        self.failures: dict[str, BaseException] = {}


class MisalignedShardsError(WdsError, ValueError):
    """Parallel shards do not hold the same keys in the same order."""


class EmptySourceError(WdsError, ValueError):
    """The source of a stage yields no item."""


class StateError(WdsError, ValueError):
    """The state of a pipeline cannot be saved, or does not fit the pipeline."""


class SidecarError(WdsError):
    """A file that describes a shard or a dataset cannot be used."""


class MissingSidecarError(SidecarError, OSError):
    """An index or a manifest cannot be opened, or cannot be written."""


class CorruptSidecarError(SidecarError, ValueError):
    """An index or a manifest is damaged, or of another format."""


class StaleSidecarError(SidecarError, ValueError):
    """The shards have changed since their index or manifest was written."""


class WrongSidecarError(SidecarError, ValueError):
    """An index does not match its shard."""


class UnsupportedSidecarError(SidecarError, ValueError):
    """The index format cannot describe the shard, or does not support the request."""


class ErrorBudgetError(WdsError, RuntimeError):
    """A stage has skipped more items than its `ErrorBudget` allows."""


class CacheError(WdsError, RuntimeError):
    """A cache of samples cannot be written, is damaged, or belongs to another pipeline."""


class WorkerDiedError(WdsError, RuntimeError):
    """A worker process ended without sending a result or an error."""


class WorkerTimeoutError(WdsError, TimeoutError):
    """A worker process has sent nothing within its time-out."""


class RankLostError(WdsError, RuntimeError):
    """Another rank of a distributed run has failed, exited, or does not respond."""
