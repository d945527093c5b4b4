"""Wrappers around torchdata's own loops in its worker processes.

The loops send only the exceptions that items raise. Any other failure makes the main process hang: an exception of
``worker_init_fn``, an item that cannot be pickled, or the end of the main process itself.
"""

from __future__ import annotations

import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from torchdata._utils import ExceptionWrapper
from torchdata.dataloader2.communication.eventloop import DataPipeToQueuesLoop, MultipleDataPipesToQueuesLoop
from torchdata.dataloader2.communication.messages import GetNextResponse, WorkerExceptionResponse
from torchdata.dataloader2.utils.worker import process_init_fn as init_worker

from wds_datapipes.loading.transport.serialization import describe, takes
from wds_datapipes.loading.workers.parent_watch import ParentWatch
from wds_datapipes.pipes.sharding import number_instances
from wds_datapipes.pipes.state.seeding import derive_later_seeds
from wds_datapipes.pipes.state.shard_order import guard_listings

__all__ = ["SENDABLE", "BoundLoop", "SendableError", "bind", "process_init_fn", "run_dispatcher", "run_worker"]

#: Signals that a scheduler or a closing terminal sends to a program together with its workers.
FOR_THE_PROGRAM = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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


class SendableError(ExceptionWrapper):  # type: ignore[misc]  # torchdata has no types
    """An exception in transit to another process; its class is RuntimeError if its own cannot be pickled.

    The exceptions of a group are sent with it, so that ``except*`` finds them.

    Args:
        exc_info: the return value of ``sys.exc_info()``, or ``None`` for the exception that is being handled.
        where: where it was raised, as the end of the sentence "Caught ...".
        depth: the number of groups that contain the exception.
    """

    def __init__(self, exc_info: Any = None, where: str = "in background", depth: int = 0) -> None:
        exc_info = sys.exc_info() if exc_info is None else exc_info
        super().__init__(exc_info, where)
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
                super().reraise()
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


def process_init_fn(datapipe: Any, *args: Any, **kwargs: Any) -> Any:
    """Split the data for a worker as torchdata does, with instances numbered and later passes seeded consistently."""
    datapipe = init_worker(datapipe, *args, **kwargs)
    derive_later_seeds(datapipe)
    guard_listings(datapipe, drawn_only=True)
    number_instances(datapipe)
    return datapipe


def run_worker(
    source_datapipe: Any,
    req_queue: Any,
    res_queue: Any,
    process_name: str,
    worker_info: Any,
    call_on_process_init: Callable[..., Any] | None = None,
    custom_reset_fn: Callable[..., Any] | None = None,
) -> None:
    """Run torchdata's loop of a worker, and send any exception; the arguments are those of the loop."""
    with _send_errors(f"{process_name} {worker_info.worker_id}", [res_queue]):
        DataPipeToQueuesLoop(
            source_datapipe, req_queue, res_queue, process_name, worker_info, call_on_process_init, custom_reset_fn
        )


def run_dispatcher(
    source_datapipes: Sequence[Any],
    req_queues: Sequence[Any],
    res_queues: Sequence[Any],
    process_name: str,
    worker_info: Any,
    custom_reset_fn: Callable[..., Any] | None = None,
) -> None:
    """Run torchdata's loop of the dispatching process, send any exception, and stay until ``None`` is received.

    The arguments are those that torchdata passes: its loop has one more before ``custom_reset_fn``, which is therefore
    passed in the wrong position.
    """
    for queue in res_queues:
        queue.cancel_join_thread()  # the workers that would read the rest end first
    with _send_errors(process_name, res_queues):
        for pipe in source_datapipes:
            derive_later_seeds(pipe)
        MultipleDataPipesToQueuesLoop(
            source_datapipes, req_queues, res_queues, process_name, worker_info, custom_reset_fn=custom_reset_fn
        )
    # The main process detects the end of this one immediately, and would not wait for the error that a worker forwards.
    for queue in req_queues:
        while queue.get() is not None:
            pass


def bind(watch: ParentWatch, run: Callable[..., None], *args: Any) -> None:
    """Run a worker that leaves Ctrl-C to the main process, and ends when the main process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A forked worker must not run the program's signal handlers, such as one that saves its state.
    for number in FOR_THE_PROGRAM:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    watch.hold()
    run(*args)


class BoundLoop:
    """One of torchdata's worker loops as run by `bind`, with the watch that is current when the worker starts.

    Args:
        run: the loop.
        watch: the watch; ``None`` means the current one.
    """

    def __init__(self, run: Callable[..., None], watch: ParentWatch | None = None) -> None:
        self._run, self._parent_watch = run, watch

    def __call__(self, *args: Any) -> None:
        """Run the loop in the worker. A fork inherits the thread that started it, with its current watch."""
        bind(self._parent_watch or ParentWatch.current(), self._run, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundLoop, (self._run, self._parent_watch or ParentWatch.current())


@contextmanager
def _send_errors(who: str, queues: Sequence[Any]) -> Iterator[None]:
    """Send to each of ``queues`` the exception that ends the block, and errors of items that cannot be sent.

    Exceptions such as ``SystemExit`` end the process as usual: the main process receives the exit code.
    """
    for queue in queues:
        # The queue pickles in its own thread, and calls this method on an error.
        queue._on_queue_feeder_error = partial(_report_unsendable, who, queue)
    try:
        yield
    except SENDABLE:  # not lost: the main process raises it again
        for queue in queues:
            queue.put(WorkerExceptionResponse(SendableError(where=f"in {who}")))


def _report_unsendable(who: str, queue: Any, error: Exception, response: Any) -> None:
    """Send an error instead of a response that cannot be pickled."""
    what = (
        describe(response.value, ForkingPickler.dumps)
        if isinstance(response, GetNextResponse)
        else f"a {type(response).__name__}"
    )
    refusal = pickle.PicklingError(
        f"{who} made {what}, which cannot be sent to another process ({type(error).__name__}: {error}). "
        "In the pipeline, convert it to plain data, such as bytes, arrays or tensors, before it leaves the worker."
    )
    refusal.__cause__ = error
    queue.put(WorkerExceptionResponse(SendableError((type(refusal), refusal, None), where=f"in {who}")))
