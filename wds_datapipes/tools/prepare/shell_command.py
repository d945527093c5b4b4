"""Shell commands that transform samples, with one temporary folder per sample and one file per field."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from wds_datapipes.codecs import describe_value
from wds_datapipes.codecs.field_chain import name_field
from wds_datapipes.errors import EncodeError, SampleSourceError
from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.io.shell_process import ShellProcess, describe_exit
from wds_datapipes.redaction import redact_command
from wds_datapipes.redaction.storage_options import redactor_of_command
from wds_datapipes.samples.fields import describe_sample
from wds_datapipes.types import Sample

#: The file names of the fields of one sample, or of several numbered samples.
FILE = re.compile(r"sample(?:-([0-9]+))?\.(.+)", re.DOTALL)
#: The extension of the file with the key.
KEY = "__key__"
#: The maximum length of a file name on Linux.
NAME_BYTES = 255
#: An error message includes this many bytes from the end of the output.
OUTPUT_BYTES = 2000


class SampleCommand:
    """Transforms encoded samples with a shell command, which runs in a temporary folder.

    The folder contains a file for each field, such as ``sample.jpg``, and ``sample.__key__`` with the key. When the
    command exits, the files named ``sample.*`` become the new sample; without any, the sample is dropped. Other files
    are ignored. In a pipeline of commands, each must succeed.

    Args:
        command: the shell command.
        several: whether the command writes any number of samples, as ``sample-000000.jpg`` and so on, with their keys
            in ``sample-000000.__key__``. By default, their keys are the original key followed by their number. The
            files ``sample.*`` are ignored.
        timeout_s: the time limit per sample, in seconds.

    Raises:
        ValueError: the command is empty, or the time limit is not positive.

    Examples:
        >>> upper = SampleCommand("tr a-z A-Z < sample.txt > sample.upper; rm sample.txt")
        >>> upper({"__key__": "a", "__url__": "x.tar", "txt": b"a cat"})
        {'__key__': 'a', '__url__': 'x.tar', 'upper': b'A CAT'}
    """

    def __init__(self, command: str, *, several: bool = False, timeout_s: float | None = None) -> None:
        if not command.strip():
            raise ValueError("The command is empty")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"The time limit must be positive, not {timeout_s:g} s")
        self._command, self._several, self._timeout_s = command, several, timeout_s
        self._prefix = _prefix()

    def __call__(self, sample: Sample) -> Sample | list[Sample] | None:
        """Run the command on a sample and return its results.

        Raises:
            SampleSourceError: the command fails, takes too long, or does not write a valid sample.
            EncodeError: the name of a field is not a valid file name.
        """
        with ExitStack() as opened:
            with defer_interrupts(signal.SIGTERM):
                folder = opened.enter_context(
                    tempfile.TemporaryDirectory(prefix=self._prefix, ignore_cleanup_errors=True)
                )
            write_sample(sample, folder)
            self._run(folder, sample)
            made = read_samples(sample, folder, several=self._several)
        return made if self._several else next(iter(made), None)

    def remove_leftovers(self) -> None:
        """Remove the folders of killed processes and kill the commands that still run in them.

        Call this after all workers have ended.
        """
        for folder in Path(tempfile.gettempdir()).resolve().glob(f"{self._prefix}*"):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if (process / "cwd").readlink() == folder:
                        os.kill(int(process.name), signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folder: str, sample: Sample) -> None:
        # Do not wait for background processes of the command: they may keep the output open.
        with tempfile.TemporaryFile() as output, ExitStack() as opened:
            with defer_interrupts(signal.SIGTERM):
                process = ShellProcess(self._command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
                opened.callback(process.end)
            try:
                how = describe_exit(process.wait(self._timeout_s))
            except subprocess.TimeoutExpired:
                how = f"was stopped after its time limit of {self._timeout_s:g} s"
            process.signal(signal.SIGKILL)
            if process.returncode == 0:
                return
            output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            message = redactor_of_command(self._command)(output.read().decode(errors="replace").strip())
        raise SampleSourceError(
            f"The command {redact_command(self._command)!r} {how} for {describe_sample(sample)}. "
            + (f"Its last output is: {message}" if message else "It printed nothing.")
        )

    def __repr__(self) -> str:
        return f"SampleCommand({redact_command(self._command)!r})"

    # `convert_shards` uses this as the fingerprint of the function.
    def __getstate__(self) -> tuple[Any, ...]:
        return self._command, self._several, self._timeout_s

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._command, self._several, self._timeout_s = state
        self._prefix = _prefix()


def _prefix() -> str:
    return f"wds-map-{secrets.token_hex(6)}-"


def write_sample(sample: Sample, folder: str) -> None:
    """Write the fields of a sample to an empty folder as ``sample.jpg`` and so on, and its key as ``sample.__key__``.

    Raises:
        EncodeError: the name of a field is not a valid file name. Nothing is ever written outside the folder.
        TypeError: a field is not bytes.
    """
    for field, value in sample.items():
        if field[:2] == "__" and field != KEY:
            continue
        if not isinstance(value, bytes if field != KEY else str):
            described = name_field(sample, field)
            raise TypeError(f"{described} is {describe_value(value)}, but commands take bytes")
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        name = f"sample.{field}"
        if "/" in name or "\0" in name or len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES:
            raise EncodeError(
                f"The field {field[:100]!r} of sample {str(sample.get(KEY))[:200]!r} cannot be a file for the command: "
                f"file names have at most {NAME_BYTES} bytes, without slashes and zero bytes. Rename it first"
            )
        # A name from an archive must never cause a file to be overwritten.
        with open(Path(folder, name), "xb") as file:  # noqa: PTH123
            file.write(data)


def read_samples(sample: Sample, folder: str, *, several: bool) -> list[Sample]:
    """Return the files in the folder as samples, with the fields that ``sample`` has first.

    Args:
        sample: the input of the command.
        folder: the folder.
        several: read numbered samples, stored as ``sample-000000.jpg`` and so on, in numeric order. Each key is read
            from ``sample-000000.__key__``; without that file, it is the key of ``sample`` followed by the number.

    Raises:
        SampleSourceError: an entry is not a regular file.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in os.listdir(folder):  # noqa: PTH208  names
        found = FILE.fullmatch(name)
        if found and (found[1] is not None) is several:
            groups.setdefault(found[1] or "", {})[found[2]] = name
    made = [
        _load_sample(sample, folder, groups[digits], f"{sample[KEY]}/{int(digits):06d}" if several else sample[KEY])
        for digits in sorted(groups, key=lambda digits: (int(digits or 0), digits))
    ]
    return [each for each in made if each is not None]


def _load_sample(sample: Sample, folder: str, files: Mapping[str, str], key: str) -> Sample | None:
    """Load a sample from files; ``files`` maps fields to file names."""
    fields: dict[str, bytes] = {}
    order = [field for field in sample if field in files]
    for field in [*order, *sorted(set(files) - set(order))]:
        data = _read_file(sample, folder, files[field])
        lower = field.lower()
        if field == KEY:
            key = data.decode("utf-8", "surrogateescape").rstrip("\n") or key
        elif lower in fields:
            raise SampleSourceError(f"{_describe_file(sample, files[field])} and another file for the field {lower!r}")
        elif field[:2] != "__":
            fields[lower] = data
    return {KEY: key, "__url__": sample.get("__url__", ""), **fields} if fields else None


def _read_file(sample: Sample, folder: str, name: str) -> bytes:
    path = Path(folder, name)
    # If the command unpacks an archive, a link may refer to any file of this host.
    if path.is_symlink() or not path.is_file():
        kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "not a regular file"
        raise SampleSourceError(
            f"{_describe_file(sample, name)}, which is {kind}. The fields of a sample are regular files. Name other "
            f"files so that they do not start with 'sample'"
        )
    return path.read_bytes()


def _describe_file(sample: Sample, name: str) -> str:
    return f"For {describe_sample(sample)}, the command wrote {name!r}"
