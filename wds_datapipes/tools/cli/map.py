"""The command ``map``: apply a function or a shell command to all samples of many shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from wds_datapipes.errors import ConversionError, StateError
from wds_datapipes.tools.cli.errors import FAULT_FOUND, WrongUse
from wds_datapipes.tools.cli.options.read import READ, ReadArguments, Shards, Workers
from wds_datapipes.tools.cli.options.values import FileOrUrl, Natural, load_function, metavar, parse_decoders, wrong_use
from wds_datapipes.tools.cli.printing import print_error, report_shards
from wds_datapipes.tools.prepare.convert import ConvertedShard, IfChanged, convert_shards
from wds_datapipes.tools.prepare.job_options import JobOptions
from wds_datapipes.tools.prepare.shell_command import SampleCommand
from wds_datapipes.writing.options import WriteOptions

WORK, OUTPUT, WORKERS = (
    Group(title, sort_key=number) for number, title in enumerate(("Function or command", "Output", "Workers"), 1)
)


def map(  # noqa: A001  the name of the command
    *shards: Shards,
    function: Annotated[str, metavar("MODULE:FUNCTION", alias="-f", group=WORK)] = "",
    decode: Annotated[list[str] | None, metavar("WORD", alias="-d", group=WORK)] = None,
    whole_shards: Annotated[bool, Parameter(group=WORK)] = False,
    command: Annotated[str, metavar("COMMAND", alias="-c", group=WORK)] = "",
    multi_command: Annotated[str, metavar("COMMAND", alias="-m", group=WORK)] = "",
    command_timeout: Annotated[float | None, metavar("SECONDS", group=WORK)] = None,
    on_error: Annotated[Literal["raise", "skip"], Parameter(group=WORK)] = "raise",
    output: Annotated[FileOrUrl, metavar("TARGET", alias="-o", group=OUTPUT)],
    if_changed: Annotated[IfChanged, Parameter(group=OUTPUT)] = "raise",
    compress: Annotated[str | None, metavar("KIND", group=OUTPUT)] = None,
    index: Annotated[bool, Parameter(group=OUTPUT)] = False,
    remove_old: Annotated[bool, Parameter(group=OUTPUT)] = False,
    journal: Annotated[FileOrUrl | None, metavar("FILE", group=OUTPUT)] = None,
    num_workers: Annotated[Workers, Parameter(group=WORKERS)] = None,
    shard_retries: Annotated[Natural, Parameter(group=WORKERS)] = 2,
    options: ReadArguments = READ,
) -> None:
    """Apply a function or shell command to all samples in parallel.

    Each shard gives one output shard, which appears when it is complete. After an error, Ctrl-C or kill -9, the same
    command converts only the missing shards. Failed shards are reported at the end, with exit code 1; all others are
    finished.

    A function gets the fields as bytes, or decoded with --decode. Its result is encoded by the names of its fields;
    None drops the sample. A command runs in a folder with the fields as files, sample.jpg and so on; the files sample.*
    that it leaves are the new sample.

    Args:
        function: A function that maps a sample to a sample, None or several samples.
        decode: Decode fields first: basic, or also images: pil, rgb8, torch ...; may be repeated.
        whole_shards: Call the function once per shard, with an iterator of its samples.
        command: A shell command, run for each sample in a folder with its fields as sample.jpg and so on.
        multi_command: As --command, but writes several samples: sample-000000.jpg, sample-000001.jpg and
            so on.
        command_timeout: The time limit of a command for each sample.
        on_error: Whether a failing sample fails its shard, or is skipped and reported.
        output: A folder with a slash at the end, or a pattern with {name} or %06d; there is one output
            shard for each shard.
        if_changed: How to handle finished shards made with other input or options.
        compress: gz, bz2, xz or zst; by default, the file name decides.
        index: Write an index next to each shard.
        remove_old: Remove surplus shards of an earlier, larger run.
        journal: A local file that records finished shards; by default next to local shards.
        shard_retries: The number of retries of a failed shard.
    """
    work = parse_mapping(function, command, multi_command, command_timeout, decode is not None or whole_shards)
    words, limits = parse_decoders(decode), options.limits
    urls = options.list_shards(shards)
    if "-" in urls:
        raise WrongUse("Standard input cannot be read again when a shard is retried. Write it to a file first")
    results: dict[str, ConvertedShard] = {}
    failures: dict[str, BaseException] = {}
    errors: list[Exception] = []

    def skip(error: Exception) -> bool:
        errors.append(error)
        return True

    with ExitStack() as opened:
        opened.enter_context(log_to_stderr())
        if isinstance(work, SampleCommand):
            opened.callback(work.remove_leftovers)
        try:
            with wrong_use("", StateError):
                convert_shards(
                    work,
                    urls,
                    output,
                    whole_shards=whole_shards,
                    decode=words,
                    on_error=skip if on_error == "skip" else "raise",
                    if_changed=if_changed,
                    num_workers=num_workers,
                    on_result=lambda shard: results.update({shard.source: shard}),
                    options=WriteOptions(
                        compress=compress,  # type: ignore[arg-type]  # it is checked
                        index=index,
                        key_rule=options.rule,
                        storage_options=options.store,
                    ),
                    job=JobOptions(
                        journal=journal,
                        retries=shard_retries,
                        remove_old=remove_old,
                        end_marker=options.end_marker,
                        limits=limits,
                    ),
                )
        except ConversionError as error:
            failures = error.failures
    done = [results[url] for url in urls if url in results]
    report_shards(done, errors, as_json=options.json, facts={}, failures=failures)
    if failures:
        raise SystemExit(FAULT_FOUND)


def parse_mapping(
    function: str, command: str, multi_command: str, timeout: float | None, has_function_options: bool
) -> Callable[..., Any]:
    """Return the function or command to apply to the samples."""
    if [function, command, multi_command].count("") != 2:
        raise WrongUse("map requires exactly one of --function, --command and --multi-command")
    if function:
        if timeout is not None:
            raise WrongUse("--command-timeout requires --command or --multi-command. It cannot stop a function")
        return load_function(function)
    if has_function_options:
        raise WrongUse("--decode and --whole-shards require --function. Commands get the fields of one sample as files")
    with wrong_use():
        return SampleCommand(command or multi_command, several=bool(multi_command), timeout_s=timeout)


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Print the warnings that the library logs, such as retries of a shard, to standard error."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: print_error(record.getMessage(), "Warning")  # type: ignore[method-assign]  # a class would be longer
    logger = logging.getLogger("wds_datapipes")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
