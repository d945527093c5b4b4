"""Exclusions: samples that an epoch leaves out, selected by keys or by functions of indexes."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import StateError
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.format.options import Exclude
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.select import by_dataset, numbers_of, values_of
from wds_datapipes.io.once_per_host import share_on_host
from wds_datapipes.io.openers import redact
from wds_datapipes.io.sidecars import read_sidecar


class Exclusions:
    """The samples left out of each dataset, as a list of keys and functions to which a run may only append.

    A state therefore only needs the length and a digest of a list: later lists begin with it.

    Args:
        lists: the list of each dataset, by name.
    """

    def __init__(self, lists: Mapping[str, list[Any]]) -> None:
        self._lists = lists
        self._keys = {name: frozenset(each for each in items if isinstance(each, str)) for name, items in lists.items()}

    def together(self, others: Sequence[Exclusions]) -> Exclusions:
        """Return these exclusions and those of other stages, with the number of its stage before each name."""
        found = {f"{number} {name}": own for number, each in enumerate(others) for name, own in each._lists.items()}
        return Exclusions({**self._lists, **found})

    @classmethod
    def of(cls, exclude: Any, names: Collection[str], storage_options: Mapping[str, Any] | None) -> Exclusions:
        """Return the exclusions for an argument ``exclude`` and some datasets; None excludes nothing.

        Raises:
            MissingSidecarError: the file of keys cannot be read.
            TypeError: it is neither a file, a function nor a list of keys and functions, or `by_dataset` refuses it.
            ValueError: there is no dataset with one of the names.
        """
        lists = by_dataset("exclude", exclude, names)
        return cls({name: _items_of(each, storage_options) for name, each in lists.items() if each is not None})

    def __bool__(self) -> bool:
        return any(self._lists.values())

    def note(self) -> dict[str, list[Any]]:
        """Return the length and digest of each dataset's list, for a state."""
        return {name: [len(items), _digest(items)] for name, items in self._lists.items() if items}

    def at(self, history: Sequence[Mapping[str, Any]], epoch: int, position: int) -> Exclusions:
        """Return the exclusions of a run at a position of an epoch."""
        found = [each for each in history if "excluded" in each]
        notes = [each["excluded"] for each in found if (each["epoch"], each["position"]) <= (epoch, position)]
        return Exclusions({name: self._lists[name][:count] for name, (count, _) in notes[-1].items()} if notes else {})

    def extend(self, history: Sequence[Mapping[str, Any]], epoch: int, position: int) -> list[Any]:
        """Return the history of a run, extended by these exclusions if some were added.

        Args:
            history: the records of the run so far; some have an epoch, a position in it, and a `note` that applies from
                there on.
            epoch: the epoch in which the run resumes.
            position: the position in this epoch.

        Raises:
            StateError: these exclusions do not begin with the earlier ones.
        """
        note: dict[str, list[Any]] = next((each["excluded"] for each in reversed(history) if "excluded" in each), {})
        differences = [
            f"{f'those of {name!r}' if name else 'they'} were {count} (#{digest}), and "
            + (f"are {len(own)}" if len(own) < count else f"the first {count} are now others (#{_digest(own[:count])})")
            for name, (count, digest) in note.items()
            if len(own := self._lists.get(name, [])) < count or _digest(own[:count]) != digest
        ]
        if differences:
            raise StateError(
                "EpochOptions(exclude=) must begin with what it had when this state was saved, in the same order; "
                f"otherwise, excluded samples would return: {'; '.join(differences)}. Append new ones at the end"
            )
        changed = {"epoch": epoch, "position": position, "excluded": self.note()}
        return [*history, *([changed] if self.note() != note else [])]

    def keys_of(self, name: str) -> frozenset[str]:
        """Return the keys that are excluded from a dataset."""
        return self._keys.get(name, frozenset())

    def find_in(self, name: str, index: ShardIndex) -> tuple[npt.NDArray[np.bool_], set[str]]:
        """Return a mask of the excluded samples in a shard of a dataset, and the keys that were found."""
        mask, found, wanted = np.zeros(len(index), bool), set[str](), self.keys_of(name)
        if wanted:
            keys = index.keys
            numbers = [number for number, key in enumerate(keys) if key in wanted]
            mask[numbers] = True
            found = {keys[number] for number in numbers}
        for function in filter(callable, self._lists.get(name, ())):
            where = f" of {index.columns.index_name}"
            mask[numbers_of(values_of("exclude", function, index), len(index), where, argument="exclude")] = True
        return mask, found


def _items_of(exclude: Exclude, storage_options: Mapping[str, Any] | None) -> list[Any]:
    """Return keys and functions as a list."""
    if isinstance(exclude, str | os.PathLike):
        url = os.fspath(exclude)

        def read(_: object) -> list[str]:
            text = read_sidecar(url, storage_options).removeprefix(BOM_UTF8)
            lines = text.decode("utf-8", "surrogateescape").split("\n")
            return [key for line in lines if (key := line.rstrip("\r"))]

        return share_on_host(f"reads {redact(url)}", read, url, storage_options)
    if isinstance(exclude, set | frozenset):
        raise TypeError("exclude must be a list, not a set: a run may only append to it, so its order matters")
    items = [exclude] if callable(exclude) else [str(each) if isinstance(each, str) else each for each in exclude]
    if wrong := [each for each in items if not (isinstance(each, str) or callable(each))]:
        raise TypeError(f"exclude must consist of keys and functions, not of {wrong[0]!r:.100}")
    return items


def _digest(items: list[Any]) -> str:
    return fingerprint(items)[:12]
