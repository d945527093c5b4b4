"""Options of the commands that read shards.

Annotations are not postponed: cyclopts would look for their names in the module of a class that inherits a field.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from cyclopts import Group, Parameter

from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.samples.keys import KeyRule, first_dot, last_dot
from wds_datapipes.shards.patterns import expand_urls
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tools.cli.errors import WrongUse
from wds_datapipes.tools.cli.options.values import FileOrUrl, Natural, metavar, parse_bytes, wrong_use

STORES = Group("Stores", sort_key=9)
Shards: TypeAlias = Annotated[
    FileOrUrl,
    Parameter(
        required=True,
        help="Paths, URLs or patterns, such as 'train-{000..099}.tar' or 's3://bucket/train-*.tar'; - is standard "
        "input.",
    ),
]
Workers: TypeAlias = Annotated[
    Natural | None, Parameter(help="The number of processes, by default one per CPU; 0 uses this process.")
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreArguments:
    """Options of commands that read from stores.

    Args:
        storage_options: Options for fsspec, such as '{"anon": true}', or @FILE.
        timeout: The timeout for a silent store; 30 by default for web servers.
        retries: The number of retries of a request to a store; 10 by default.
    """

    storage_options: Annotated[str, metavar("JSON", group=STORES)] = ""
    timeout: Annotated[float | None, metavar("SECONDS", group=STORES)] = None
    retries: Annotated[Natural | None, Parameter(group=STORES)] = None

    @cached_property
    def store(self) -> dict[str, Any] | None:
        """The storage options, parsed, with ``--timeout`` and ``--retries``.

        >>> StoreArguments(storage_options='{"anon": true}', timeout=5).store
        {'anon': True, 'timeout_s': 5}
        """
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise WrongUse(f"--timeout must be a positive number of seconds, not {self.timeout:g}")
        waiting = {"timeout_s": self.timeout, "retries": self.retries}
        options = {name: value for name, value in waiting.items() if value is not None}
        return {**_parse_json_options(self.storage_options), **options} or None

    def list_shards(self, patterns: Sequence[str]) -> list[str]:
        """Expand patterns to the URLs of shards, in order."""
        named = [f"{each}/" if os.path.isdir(each) and not each.endswith("/") else each for each in patterns]  # noqa: PTH112  as typed
        return expand_urls(named, variables=os.environ, storage_options=self.store)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SampleArguments(StoreArguments):
    """Options of commands that handle samples.

    Args:
        json: Print the result as JSON.
        key_rule: The dot of a file name at which the key ends.
        limit: A limit for reading, such as member_bytes=20GiB or expansion=none; may be repeated.
    """

    json: bool = False
    key_rule: Literal["first-dot", "last-dot"] = "first-dot"
    limit: Annotated[list[str] | None, metavar("NAME=VALUE")] = None

    @property
    def rule(self) -> KeyRule:
        """The key rule."""
        return first_dot if self.key_rule == "first-dot" else last_dot

    @property
    def limits(self) -> ReadLimits:
        """The limits.

        >>> SampleArguments(limit=["member_bytes=20GB", "expansion=none"]).limits.member_bytes
        20000000000
        """
        names = [field.name for field in fields(ReadLimits)]
        found: dict[str, Any] = {}
        for text in self.limit or ():
            name, _, value = text.partition("=")
            if name not in names or not value:
                raise WrongUse(f"--limit must be NAME=VALUE with one of the names {', '.join(names)}, not {text!r}")
            number = None if value.lower() == "none" else parse_bytes(value, f"--limit {name}")
            found[name] = number if number is None or name == "expansion" else int(number)
        with wrong_use("--limit: "):
            return ReadLimits(**found)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReadArguments(SampleArguments):
    """Options of commands that read shards.

    Args:
        end_marker: Whether a shard must have an end marker; final ignores data that follow it.
    """

    end_marker: EndMarker = "required"

    @property
    def reading(self) -> dict[str, Any]:
        """Keyword arguments for functions that read samples."""
        options = {"key_rule": self.rule, "end_marker": self.end_marker, "storage_options": self.store}
        return {**options, "limits": self.limits}


def _parse_json_options(text: str) -> dict[str, Any]:
    if not text:
        return {}
    with wrong_use("--storage-options: ", OSError, RecursionError):
        options = json.loads(Path(text[1:]).read_text(encoding="utf-8-sig") if text.startswith("@") else text)
    if not isinstance(options, dict):
        raise WrongUse("--storage-options must be a JSON object, as in '{\"anon\": true}'")
    return options


#: What commands read with if no option is given.
READ, STORE = ReadArguments(), StoreArguments()
