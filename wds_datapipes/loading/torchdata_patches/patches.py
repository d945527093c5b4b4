"""The patches of torchdata's own ``DataLoader2`` and ``MultiProcessingReadingService``.

torchdata 0.7.1 to 0.9.0 are the last releases that include them, and will not be fixed
(https://github.com/meta-pytorch/data/issues/1196). Pipelines of tar shards trigger every defect: shards are uneven, so
the first epoch ends in an exception. Importing ``wds_datapipes`` therefore replaces the defective parts, in these
releases only, and only if the files are, byte for byte, those that the patches were written for.
``wds_datapipes.list_patches()`` lists the patches; the environment variable ``WDS_DATAPIPES_PATCHES=0`` leaves
torchdata unchanged.

Each patch is one function, in `multiprocessing_service`, `dataloader2` and `shares`. Its docstring describes the defect
and the patch.
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

from wds_datapipes.loading.torchdata_patches.dataloader2 import LOADER_PATCHES, TORCH_PATCHES
from wds_datapipes.loading.torchdata_patches.multiprocessing_service import WORKER_PATCHES

__all__ = ["Patch", "apply", "list_patches"]

ISSUES = "https://github.com/meta-pytorch/data/issues/"

#: The files that the patches rely on, and the prefix of the SHA-256 of each in torchdata 0.7.1 and in 0.8.0 = 0.9.0.
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
    """A defect of torchdata, and whether it is patched in this process.

    Attributes:
        name: the name of the function that patches it.
        fault: the defect, in one sentence.
        issue: the URL of the issue that reports it, or ``None``.
        applied: whether it is patched.
        reason: the reason why it is not, or "".
    """

    name: str
    fault: str
    issue: str | None
    applied: bool
    reason: str

    def __str__(self) -> str:
        state = "patched" if self.applied else f"not patched: {self.reason}"
        return f"{self.name}: {self.fault} [{state}]" + (f" {self.issue}" if self.issue else "")


#: The patches of this process. They replace attributes of torchdata's modules, which exist once per process.
_done: list[Patch] = []


def list_patches() -> list[Patch]:
    """Return the known defects of torchdata's DataLoader2, and whether each is patched in this process.

    Examples:
        >>> from wds_datapipes import list_patches
        >>> names = [patch.name for patch in list_patches()]
        >>> names[:5]
        ['uneven_workers', 'dead_workers', 'lost_errors', 'orphans', 'shutdown']
        >>> names[5:9]
        ['stuck_pause', 'repeated_order', 'uneven_ranks', 'lists_drawn_in_workers']
        >>> names[9:14]
        ['copied_by_workers', 'endless_passes', 'unseeded_service', 'local_functions', 'pickled_pipeline']
        >>> names[14:17]
        ['uncounted_items', 'no_set_epoch', 'no_length']
        >>> names[17:]
        ['later_passes', 'local_classes', 'copied_data', 'unknown_position', 'late_shuffle']
    """
    return list(_done)


def apply() -> None:
    """Patch torchdata, once per process."""
    if _done:
        return
    unwanted = "WDS_DATAPIPES_PATCHES=0 is set" if os.environ.get("WDS_DATAPIPES_PATCHES") == "0" else ""
    reason = unwanted or _reason_against()
    for patches, against in ((WORKER_PATCHES, reason), (LOADER_PATCHES, reason), (TORCH_PATCHES, unwanted)):
        for patch, issue in patches:
            if not against:
                patch()
            fault = str(patch.__doc__).partition("\n")[0]
            url = f"{ISSUES}{issue}" if issue else None
            _done.append(Patch(patch.__name__, fault, url, not against, against))


def _reason_against() -> str:
    """Import torchdata's DataLoader2, and return the reason not to patch it, or ""."""
    if os.name != "posix":
        return f"worker processes are only watched on POSIX systems, and this one is {os.name!r}"
    torchdata = _import_quietly()
    if torchdata is None:
        return "torchdata is not installed, or has no DataLoader2"
    version = torchdata.__version__.partition("+")[0]
    if version not in _KNOWN_VERSIONS:
        return f"torchdata {version} is not one of {', '.join(_KNOWN_VERSIONS)}"
    for name, digests in _KNOWN_FILES.items():
        path = Path(str(torchdata.__file__)).parent / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest()[:16] not in digests:
            return f"{path} is not the file of torchdata {version} that the patches were written for"
    return ""


def _import_quietly() -> ModuleType | None:
    """Import torchdata with its DataLoader2, without the warning that this import always emits."""
    with warnings.catch_warnings():
        banner = r"\n#+\nWARNING!\nThe 'datapipes', 'dataloader2' modules are deprecated"
        warnings.filterwarnings("ignore", message=banner, category=UserWarning)
        try:
            importlib.import_module("torchdata.dataloader2")
        except ImportError:
            return None
    return importlib.import_module("torchdata")
