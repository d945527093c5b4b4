"""Imports of optional packages, with an error that says how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

from wds_datapipes.errors import MissingDependencyError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional package, or raise an error that says how to install it.

    Args:
        module: the name to import, such as ``"msgpack"``.
        extra: the extra of this package that installs it.
        purpose: what the package is needed for; completes "... is needed to".

    Raises:
        MissingDependencyError: the package is not installed or cannot be imported; the cause is chained.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        advice = f'Install it with: python -m pip install "wds-datapipes[{extra}]"'
        if str(error.name).startswith("torch."):
            advice = "It is installed, and needs a release of PyTorch that has DataPipes"
        raise MissingDependencyError(
            f"{module!r} is needed to {purpose}, and importing it failed ({error}). {advice}"
        ) from error
