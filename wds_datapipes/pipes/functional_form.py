"""The functional forms of stages, such as ``.map_samples()``: the first use of one imports the module of its stage."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from wds_datapipes.arguments import check_call
from wds_datapipes.datapipes import IterDataPipe


class FunctionalForm:  # noqa: D101  the docstring is that of the stage
    def __init__(self, name: str, module: str, kind: str) -> None:
        self._name, self._module, self._kind = name, module, kind
        #: The full name of the class.
        self.path = f"{module}.{kind}"

    @property
    def __wrapped__(self) -> Any:
        """The class of the stage."""
        return getattr(import_module(self._module), self._kind)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]  # help() of the form shows it
        """The docstring of the stage."""
        text: str | None = self.__wrapped__.__doc__
        return text

    def __call__(self, source: IterDataPipe[Any], /, *arguments: Any, **options: Any) -> IterDataPipe[Any]:
        """Append the stage to a pipeline."""
        stage = self.__wrapped__
        check_call(f".{self._name}()", vars(stage)["__init__"], (None, source, *arguments), options, hidden=2)
        appended: IterDataPipe[Any] = stage(source, *arguments, **options)
        return appended


def register_stage(name: str, module: str, kind: str) -> None:
    """Register a stage like torch's ``functional_datapipe``, but without importing it, and allow any keyword.

    torch builds the stage in a function with the parameters ``cls`` and ``source_dp``, which raises TypeError for
    keywords with these names, although ``cls`` is one of the most common fields.

    Args:
        name: the functional name.
        module: the module that defines the stage.
        kind: the name of its class.

    Raises:
        ValueError: another stage has this name.
    """
    if name in IterDataPipe.functions:
        raise ValueError(f"cannot register {kind}: another stage has the name {name!r}")
    IterDataPipe.register_function(name, FunctionalForm(name, module, kind))
