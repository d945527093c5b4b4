"""The functional names of torch and torchdata, as methods of this package's stages: errors say what to write."""

from __future__ import annotations

from functools import partial, update_wrapper
from typing import Any

from wds_datapipes.arguments import check_call, check_integer
from wds_datapipes.datapipes import IterDataPipe, Shuffler
from wds_datapipes.datapipes.torchdata_stages import STAGES, import_stages
from wds_datapipes.foreign_names import explain_name


def functional_form(stage: Any, name: str) -> Any:
    """Return what builds the stage with a functional name after another; the first of torchdata imports torchdata.

    Raises:
        AttributeError: there is no such name; the error says what to write for a name of another package.
    """
    if name == "shuffle":
        return partial(_shuffle, stage)
    if name in IterDataPipe.functions or (name in STAGES and import_stages()):
        build = IterDataPipe.functions[name]
        return update_wrapper(partial(build, stage), build, assigned=("__doc__",))
    message = f"{type(stage).__name__!r} object has no attribute {name!r}{explain_name(name)}"
    raise AttributeError(message, name=name, obj=stage)  # lets Python suggest a similar name


def _shuffle(source: Any, *arguments: Any, **options: Any) -> Any:
    """Build torch's ``.shuffle()``, whose own error for wrong arguments also prints one of its ``__del__``."""
    if arguments:
        raise TypeError(
            f".shuffle() takes no positional arguments. To shuffle samples, write .shuffle_samples("
            f"{arguments[0]!r}); to shuffle a list of shards, .shuffle(), before .sharding_filter()"
        )
    check_call(".shuffle()", Shuffler.__init__, (None, source), options, hidden=2)
    check_integer("buffer_size", options.get("buffer_size", 1), 1)
    return IterDataPipe.functions["shuffle"](source, **options)
