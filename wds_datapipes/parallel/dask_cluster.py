"""A Dask cluster that works on shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wds_datapipes.extras import require

__all__ = ["connect_dask", "send_module"]

#: How long to wait for a scheduler, in seconds.
CONNECT_S = 10


@contextmanager
def connect_dask(address: str) -> Iterator[Any]:
    """Connect to a scheduler, and lend the client.

    Args:
        address: such as ``"tcp://host:8786"``, or ``"host:8786"``.

    Raises:
        MissingDependencyError: Dask is not installed.
        ConnectionError: there is no scheduler.
    """
    distributed = require("distributed", extra="dask", purpose="reach a Dask cluster")
    try:
        client = distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise ConnectionError(f"There is no Dask scheduler at {address!r}: {type(error).__name__}: {error}") from None
    try:
        yield client
    finally:
        client.close()


def send_module(client: Any, function: Callable[..., Any], folder: Path) -> None:
    """Send the module of a function to all workers, if it is a file of a folder, where they need not be."""
    module = inspect.getmodule(function)
    file = getattr(module, "__file__", None)
    if file is not None and Path(file).parent == folder:
        client.upload_file(file)
