"""Imports of packages that may be missing, with an error that says how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

from wds_datapipes.errors import MissingDependencyError

#: The releases of torchdata with ``DataLoader2``, which are installed with this package, and those with
#: ``torchdata.nodes``, which may replace them.
DATALOADER2 = "torchdata>=0.7.1,<0.10"
NODES = "torchdata>=0.10"


def require(module: str, *, extra: str = "", release: str = "", purpose: str) -> ModuleType:
    """Import a package that may be missing, or raise an error that says how to install it.

    Args:
        module: the name to import, such as ``"msgpack"``.
        extra: the extra of this package that installs it.
        release: the package to install, if there is no extra.
        purpose: what the package is needed for; completes "... is needed to".

    Raises:
        MissingDependencyError: the package is not installed or cannot be imported; the cause is chained.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        advice = f'Install it with: python -m pip install "{release or f"wds-datapipes[{extra}]"}"'
        raise MissingDependencyError(
            f"{module!r} is needed to {purpose}, and importing it failed ({error}). {advice}"
        ) from error
