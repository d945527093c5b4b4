"""Wrappers around torchdata's own loops in its worker processes.

The loops send what an item raised. After everything else that goes wrong they leave the main process waiting: what
``worker_init_fn`` raises, an item that cannot be pickled, the end of the main process itself.
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

#: Signals that a program is sent together with its workers, by a scheduler or a terminal that ends.
FOR_THE_PROGRAM = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


#: What is sent to the main process in place of ending the worker: all errors, and groups of anything.
SENDABLE: tuple[type[BaseException], ...]
#: The builtin classes of exception groups, if there are any: the general one, and that of errors alone.
_GROUPS: tuple[type[BaseException], ...]
if sys.version_info >= (3, 11):
    from builtins import BaseExceptionGroup, ExceptionGroup

    SENDABLE, _GROUPS = (Exception, BaseExceptionGroup), (BaseExceptionGroup, ExceptionGroup)
else:
    SENDABLE, _GROUPS = (Exception,), ()

#: How deep groups of groups are sent as such; tracebacks show as many.
GROUP_DEPTH = 10


class SendableError(ExceptionWrapper):  # type: ignore[misc]  # torchdata has no types
    """An exception on its way to another process; its class is RuntimeError if its own cannot be pickled.

    The exceptions of a group are sent with it, so that ``except*`` finds them.

    Args:
        exc_info: what ``sys.exc_info()`` returns, or None for the exception that is handled now.
        where: where it was raised, as the end of the sentence "Caught ...".
        depth: how many groups the exception is in.
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
            self.exc_type: type[BaseException] = RuntimeError  # the text names the class

    def reraise(self) -> NoReturn:
        """Raise the exception again, with all that is known about it as its message; or RuntimeError with that."""
        text = f"Caught {self.exc_type.__name__} {self.where}.\nOriginal {self.exc_msg}"
        if self._parts:
            raise self._group(text)
        # A generator cannot raise StopIteration.
        if not issubclass(self.exc_type, (StopIteration, StopAsyncIteration)):
            try:
                super().reraise()
            except Exception as error:  # the class may be anybody's, and raise when it gets a message
                if type(error) is self.exc_type:
                    raise
        raise RuntimeError(text)

    def error(self) -> BaseException:
        """Return what `reraise` raises."""
        try:
            self.reraise()
        except BaseException as error:  # noqa: BLE001 - it is what was asked for
            return error

    def _group(self, text: str) -> BaseException:
        """Return a group of what the parts raise: of its own class, if that takes them, or else of a builtin one."""
        errors = [part.error() for part in self._parts]
        general, of_errors = _GROUPS
        if issubclass(self.exc_type, general):
            with suppress(Exception):
                if type(group := self.exc_type(text, errors)) is self.exc_type:
                    return group
        return (of_errors if all(isinstance(error, Exception) for error in errors) else general)(text, errors)


def process_init_fn(datapipe: Any, *args: Any, **kwargs: Any) -> Any:
    """Give a worker its share as torchdata does, with instances numbered and later passes seeded alike everywhere."""
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
    """Run torchdata's loop of a worker and send whatever it raises; the arguments are the loop's."""
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
    """Run torchdata's loop of the dispatching process, send whatever it raises, and stay until None is received.

    The arguments are those torchdata passes: its loop has one more before ``custom_reset_fn``, which therefore lands
    in the wrong place.
    """
    for queue in res_queues:
        queue.cancel_join_thread()  # the workers that would read the rest end first
    with _send_errors(process_name, res_queues):
        for pipe in source_datapipes:
            derive_later_seeds(pipe)
        MultipleDataPipesToQueuesLoop(
            source_datapipes, req_queues, res_queues, process_name, worker_info, custom_reset_fn=custom_reset_fn
        )
    # The main process sees at once that this one has ended, and would not wait for the error that a worker passes on.
    for queue in req_queues:
        while queue.get() is not None:
            pass


def bind(lifeline: ParentWatch, run: Callable[..., None], *args: Any) -> None:
    """Run a worker that leaves Ctrl-C to the main process, and that ends when the main process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the program does about a signal, such as saving its state, is not for a forked worker to do as well.
    for number in FOR_THE_PROGRAM:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    lifeline.hold()
    run(*args)


class BoundLoop:
    """One of torchdata's loops for workers as `bind` runs it, with the lifeline that is current when one is started.

    Args:
        run: the loop.
        lifeline: the lifeline; None stands for the current one.
    """

    def __init__(self, run: Callable[..., None], lifeline: ParentWatch | None = None) -> None:
        self._run, self._lifeline = run, lifeline

    def __call__(self, *args: Any) -> None:
        """Run the loop, in the worker. A fork still has the thread that has started it, and what is current there."""
        bind(self._lifeline or ParentWatch.current(), self._run, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundLoop, (self._run, self._lifeline or ParentWatch.current())


@contextmanager
def _send_errors(who: str, queues: Sequence[Any]) -> Iterator[None]:
    """Send to every one of ``queues`` the exception that ends the block, and what cannot be sent by itself.

    ``SystemExit`` and its like end the process, as they should: the main process sees the exit code.
    """
    for queue in queues:
        # The queue pickles in a thread of its own and asks this method what to do about an error.
        queue._on_queue_feeder_error = partial(_report_unsendable, who, queue)
    try:
        yield
    except SENDABLE:  # it is not lost: the main process raises it again
        for queue in queues:
            queue.put(WorkerExceptionResponse(SendableError(where=f"in {who}")))


def _report_unsendable(who: str, queue: Any, error: Exception, response: Any) -> None:
    """Send an error in the place of a response that cannot be pickled."""
    what = (
        describe(response.value, ForkingPickler.dumps)
        if isinstance(response, GetNextResponse)
        else f"a {type(response).__name__}"
    )
    refusal = pickle.PicklingError(
        f"{who} made {what}, which cannot be sent to another process ({type(error).__name__}: {error}). "
        "Let the pipeline turn it into plain data, such as bytes, arrays or tensors, before it leaves the worker."
    )
    refusal.__cause__ = error
    queue.put(WorkerExceptionResponse(SendableError((type(refusal), refusal, None), where=f"in {who}")))
