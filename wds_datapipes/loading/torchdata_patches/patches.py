"""The patches of torchdata's own ``DataLoader2`` and ``MultiProcessingReadingService``.

torchdata 0.7.1 to 0.9.0 are the last releases that have them, and their faults will not be mended there
(https://github.com/meta-pytorch/data/issues/1196). Pipelines of tar shards meet every one of them: shards are uneven,
so the first epoch ends in an exception. Importing ``wds_datapipes`` therefore replaces the parts below, in these
releases only, and only where the files are, byte for byte, those that were studied. ``wds_datapipes.repairs()`` tells
what was done; the environment variable ``WDS_DATAPIPES_REPAIRS=0`` leaves torchdata as it is.

Each repair is one function, in `workerrepairs` and `loaderrepairs`: its docstring says what was wrong and what is done
about it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from wds_datapipes.loading.torchdata_patches.dataloader2 import LOADER_REPAIRS, TORCH_REPAIRS
from wds_datapipes.loading.torchdata_patches.multiprocessing_service import WORKER_REPAIRS

__all__ = ["Patch", "apply", "repairs"]

#: The files that the repairs rely on, and the beginning of the SHA-256 of each in torchdata 0.7.1 and in 0.8.0 = 0.9.0.
_KNOWN_VERSIONS = ("0.7.1", "0.8.0", "0.9.0")
_KNOWN_FILES = {
    "dataloader2/communication/eventloop.py": ("bd07a7ce4ded5bc5",),
    "dataloader2/communication/iter.py": ("672f67d7faacfd5d",),
    "dataloader2/communication/messages.py": ("b918395161a84395",),
    "dataloader2/communication/protocol.py": ("b3ec99da8ec2a3ea",),
    "dataloader2/dataloader2.py": ("d93f8cdf14f43c29", "752627c2b4103ef6"),
    "dataloader2/random/seed_generator.py": ("90bc8f5830c25b17", "b53449ffa3300c71"),
    "dataloader2/reading_service.py": ("d4119658d124024d", "622e2cceba12003d"),
    "dataloader2/utils/worker.py": ("3e17d79236d6570f",),
    "datapipes/iter/util/prefetcher.py": ("3fbb9b0c02b4b70c",),
}


class Patch(NamedTuple):
    """One fault of torchdata, and whether it is mended in this process.

    Attributes:
        name: the function that mends it.
        what: the fault, in one sentence.
        issue: where others have reported it, or None.
        applied: whether it is mended.
        reason: why it is not, or "".
    """

    name: str
    what: str
    issue: str | None
    applied: bool
    reason: str

    def __str__(self) -> str:
        state = "mended" if self.applied else f"not mended: {self.reason}"
        return f"{self.name}: {self.what} [{state}]" + (f" {self.issue}" if self.issue else "")


_done: list[Patch] = []


def repairs() -> list[Patch]:
    """Return what is wrong in torchdata's DataLoader2, and what of it is mended in this process.

    Examples:
        >>> from wds_datapipes import repairs
        >>> names = [repair.name for repair in repairs()]
        >>> names[:5]
        ['uneven_workers', 'dead_workers', 'lost_errors', 'orphans', 'shutdown']
        >>> names[5:9]
        ['stuck_pause', 'repeated_order', 'uneven_ranks', 'lists_drawn_in_workers']
        >>> names[9:]
        ['unseeded_service', 'pickled_pipeline', 'no_set_epoch', 'no_length', 'later_passes', 'unknown_place']
    """
    return list(_done)


def apply() -> None:
    """Mend torchdata, once in a process; do nothing where there is nothing to mend."""
    if _done:
        return
    unwanted = "WDS_DATAPIPES_REPAIRS=0 is set" if os.environ.get("WDS_DATAPIPES_REPAIRS") == "0" else ""
    reason = unwanted or _reason_against()
    for mends, against in ((WORKER_REPAIRS, reason), (LOADER_REPAIRS, reason), (TORCH_REPAIRS, unwanted)):
        for mend, issue in mends:
            if not against:
                mend()
            what = str(mend.__doc__).partition("\n")[0]
            _done.append(Patch(mend.__name__, what, issue, not against, against))


def _reason_against() -> str:
    """Import torchdata's DataLoader2, and return why it must be left alone, or ""."""
    if os.name != "posix":
        return f"worker processes are only watched on POSIX systems, and this one is {os.name!r}"
    torchdata = _import_quietly()
    if torchdata is None:
        return "torchdata is not installed, or has no DataLoader2"
    version = torchdata.__version__.partition("+")[0]
    if version not in _KNOWN_VERSIONS:
        return f"torchdata {version} is none of {', '.join(_KNOWN_VERSIONS)}"
    for name, digests in _KNOWN_FILES.items():
        path = Path(str(torchdata.__file__)).parent / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest()[:16] not in digests:
            return f"{path} is not the file of torchdata {version} that these repairs were written for"
    return ""


def _import_quietly() -> ModuleType | None:
    """Import torchdata with its DataLoader2, without the one warning that this import always gives."""
    with warnings.catch_warnings():
        banner = r"\n#+\nWARNING!\nThe 'datapipes', 'dataloader2' modules are deprecated"
        warnings.filterwarnings("ignore", message=banner, category=UserWarning)
        try:
            importlib.import_module("torchdata.dataloader2")
        except ImportError:
            return None
    return importlib.import_module("torchdata")
