"""Every error this package raises on purpose.

    WdsError
    ├── PatternError (ValueError)           a shard pattern that cannot be expanded, or matches nothing
    ├── SpecError (ValueError)              a dataset specification that is wrong
    ├── UnknownScheme (ValueError)          a URL scheme that no opener and no file system answers for
    ├── RefusedURL (ValueError)             a URL that names a file of this host or a command, where none is wanted
    ├── MissingDependency (ImportError)     an optional package is not installed
    ├── ShardError                          one shard cannot be read to its end
    │   ├── ShardNotOpened (OSError)        it could not be opened
    │   ├── CommandFailed (OSError)         a ``pipe:`` command ended with an error
    │   ├── ReadFailed (OSError)            its disk, store or network failed in the middle
    │   ├── TruncatedShard (EOFError)       it ends too early
    │   ├── CorruptShard (ValueError)       it holds bytes that are not a tar archive
    │   ├── UnsupportedMember (ValueError)  it holds a member that cannot be read faithfully, such as a sparse file
    │   ├── LimitExceeded (ValueError)      it asks for more than `ReadLimits` allow
    │   └── ChangedShard (ValueError)       it is not what it was when a state was saved
    ├── SampleError                         one sample cannot be used
    │   ├── DuplicateField (ValueError)     a field occurs twice in one sample
    │   ├── ReturningKey (ValueError)       a key comes back after other samples of its shard
    │   ├── MissingField (ValueError)       a field that was asked for is not there
    │   ├── MissingEntry (LookupError)      a table has nothing for its key
    │   ├── DecodeError (ValueError)        a field's bytes are not what its name says
    │   │   └── UnsafeCodec                 the field's codec can run code, and that was not allowed
    │   ├── EncodeError (ValueError)        a field's value is not what its name says
    │   ├── BadSource (ValueError)          what it is to be made of cannot be read, or makes no sample
    │   ├── UnwritableSample (ValueError)   its names would be read back as others, or its key is there already
    │   └── SampleCommandFailed (OSError)   a shell command that maps samples has failed with it
    ├── ShardNotWritten (OSError)           a shard could not be written, and nothing stands under its name
    ├── ConversionFailed (RuntimeError)     some of many shards could not be converted, and the others are
    ├── MisalignedShards (ValueError)       parallel shards do not hold the same keys in the same order
    ├── EmptySource (ValueError)            a stage needs an item of its source, which yields none
    ├── StateError (ValueError)             a state cannot be saved or loaded
    ├── SidecarError                        a file that describes a shard or a dataset cannot be used
    │   ├── MissingSidecar (OSError)        it cannot be opened, or cannot be written
    │   ├── CorruptSidecar (ValueError)     it is damaged, or is something else
    │   ├── StaleSidecar (ValueError)       what it describes has changed since it was written
    │   ├── WrongSidecar (ValueError)       it says something that is not so, such as an offset without a member
    │   └── UnsupportedSidecar (ValueError) its format cannot hold what is to be described, or not serve what is asked
    ├── ErrorBudgetExceeded (RuntimeError)  a stage had to pass over more than it was allowed to
    ├── CacheError (RuntimeError)           a cache cannot be written, is damaged, or belongs to another pipeline
    ├── WorkerDied (RuntimeError)           a worker process ended without a word
    ├── WorkerTimeout (TimeoutError)        a worker process has sent nothing for too long
    └── RankLost (RuntimeError)             another rank of a distributed run has failed, left, or is silent

An error is built from one message, and the facts are in the message: torch rebuilds an exception that crosses a process
boundary from its message alone, and an error class with more arguments arrives there as a bare ``RuntimeError``.
"""

__all__ = [
    "BadSource",
    "CacheError",
    "ChangedShard",
    "CommandFailed",
    "ConversionFailed",
    "CorruptShard",
    "CorruptSidecar",
    "DecodeError",
    "DuplicateField",
    "EmptySource",
    "EncodeError",
    "ErrorBudgetExceeded",
    "LimitExceeded",
    "MisalignedShards",
    "MissingDependency",
    "MissingEntry",
    "MissingField",
    "MissingSidecar",
    "PatternError",
    "RankLost",
    "ReadFailed",
    "RefusedURL",
    "ReturningKey",
    "SampleCommandFailed",
    "SampleError",
    "ShardError",
    "ShardNotOpened",
    "ShardNotWritten",
    "SidecarError",
    "SpecError",
    "StaleSidecar",
    "StateError",
    "TruncatedShard",
    "UnknownScheme",
    "UnsafeCodec",
    "UnsupportedMember",
    "UnsupportedSidecar",
    "UnwritableSample",
    "WdsError",
    "WorkerDied",
    "WorkerTimeout",
    "WrongSidecar",
]


class WdsError(Exception):
    """What every error of this package is."""


class PatternError(WdsError, ValueError):
    """A shard pattern cannot be expanded, or nothing matches it."""


class SpecError(WdsError, ValueError):
    """A dataset specification cannot be read, or says what makes no sense."""


class UnknownScheme(WdsError, ValueError):
    """No opener and no file system answers for a URL's scheme."""


class RefusedURL(WdsError, ValueError):
    """A URL names a file of this host or a command, and those were not allowed where it comes from."""


class MissingDependency(WdsError, ImportError):
    """An optional package is needed and not installed."""


class ShardError(WdsError):
    """A shard cannot be read to its end.

    Attributes:
        concerns_all: whether others are sure to fail as well, as where credentials are not accepted. No ``on_error``
            passes over such an error. A copy of the error in another process does not know.
    """

    concerns_all = False


class ShardNotOpened(ShardError, OSError):
    """A shard could not be opened."""


class CommandFailed(ShardError, OSError):
    """A ``pipe:`` command ended with an error."""


class ReadFailed(ShardError, OSError):
    """The disk, the store or the network failed while a shard was being read."""


class TruncatedShard(ShardError, EOFError):
    """A shard ends before its end marker, or in the middle of a member."""


class CorruptShard(ShardError, ValueError):
    """A shard holds bytes that are not a tar archive."""


class UnsupportedMember(ShardError, ValueError):
    """A shard holds a member that cannot be read faithfully."""


class LimitExceeded(ShardError, ValueError):
    """A shard asks for more than `ReadLimits` allow."""


class ChangedShard(ShardError, ValueError):
    """A shard is not what it was when a state was saved."""


class SampleError(WdsError):
    """A sample cannot be used."""


class DuplicateField(SampleError, ValueError):
    """A field occurs twice in one sample."""


class ReturningKey(SampleError, ValueError):
    """A key comes back after other samples of the same shard."""


class MissingField(SampleError, ValueError):
    """A field that was asked for is not in the sample."""


class MissingEntry(SampleError, LookupError):
    """A table has nothing for the key of a sample."""


class DecodeError(SampleError, ValueError):
    """The bytes of a field are not what the field's name says."""


class EncodeError(SampleError, ValueError):
    """The value of a field is not what the field's name says, or nothing encodes such fields."""


class BadSource(SampleError, ValueError):
    """What a sample is to be made of cannot be read, has changed meanwhile, or makes no sample."""


class UnsafeCodec(DecodeError):
    """Decoding the field can run code, or could if it was encoded so, and that was not allowed."""


class UnwritableSample(SampleError, ValueError):
    """A sample would be read back as another: by its key, the name of a field, or a key that is there already."""


class SampleCommandFailed(SampleError, OSError):
    """A shell command has failed with a sample, has taken too long, or has left what is no sample."""


class ShardNotWritten(WdsError, OSError):
    """A shard could not be written, and nothing of it stands under its name."""


class ConversionFailed(WdsError, RuntimeError):
    """Some of many shards could not be converted. The others are.

    Attributes:
        failures: the last error of each, by the URL of the shard that was to be read.
    """

    def __init__(self, *message: object) -> None:
        super().__init__(*message)
        self.failures: dict[str, BaseException] = {}


class MisalignedShards(WdsError, ValueError):
    """Parallel shards do not hold the same keys in the same order."""


class EmptySource(WdsError, ValueError):
    """A stage needs an item of its source, and the source yields none."""


class StateError(WdsError, ValueError):
    """The state of a pipeline cannot be saved, or cannot be loaded into this one."""


class SidecarError(WdsError):
    """A file that describes a shard or a dataset cannot be used."""


class MissingSidecar(SidecarError, OSError):
    """An index or a manifest cannot be opened, or cannot be written."""


class CorruptSidecar(SidecarError, ValueError):
    """An index or a manifest is damaged, or is something else."""


class StaleSidecar(SidecarError, ValueError):
    """What an index or a manifest describes has changed since it was written."""


class WrongSidecar(SidecarError, ValueError):
    """An index says something of its shard that is not so."""


class UnsupportedSidecar(SidecarError, ValueError):
    """The format of an index cannot describe the shard, or the index cannot serve what is asked of it."""


class ErrorBudgetExceeded(WdsError, RuntimeError):
    """A stage had to pass over more items than its `ErrorBudget` allows."""


class CacheError(WdsError, RuntimeError):
    """A cache of samples cannot be written, is damaged, or belongs to another pipeline."""


class WorkerDied(WdsError, RuntimeError):
    """A worker process ended without sending a result or an error."""


class WorkerTimeout(WdsError, TimeoutError):
    """A worker process has sent nothing for longer than it was given."""


class RankLost(WdsError, RuntimeError):
    """Another rank of a distributed run has failed, has left, or says nothing."""
