"""The command ``map``: apply a function or a shell command to each sample of many shards."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from wds_datapipes.cli._app import FAULT_FOUND, WrongUse, on_one_line
from wds_datapipes.cli._conversion_report import facts_of, message_of, report
from wds_datapipes.cli._copy import Compression, RemoveOld
from wds_datapipes.cli._functions import Decode, Function, load_function, parse_decoders
from wds_datapipes.cli._options import Limits, SampleOptions, Shards, parse_limits
from wds_datapipes.errors import ConversionError, StateError
from wds_datapipes.parallel.executors import connect_dask, send_module
from wds_datapipes.prepare.convert import ConvertedShard, convert_shards
from wds_datapipes.prepare.shell_command import SampleCommand

__all__ = ["map"]

#: The help panels of the options.
WHAT, WHO = {"rich_help_panel": "Function or command"}, {"rich_help_panel": "Workers"}
WRITTEN = {"rich_help_panel": "Output"}


class Workplace(str, Enum):
    """The kind of workers for shards."""

    processes = "processes"
    dask = "dask"


class IfChanged(str, Enum):
    """How to handle finished shards with a different origin."""

    fault = "raise"
    redo = "redo"
    keep = "keep"


def map(  # noqa: A001  the name of the command
    shards: Shards,
    options: SampleOptions,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="TARGET",
            help="A folder with a slash at the end, or a pattern with {name} or %06d; each shard gives one shard.",
            **WRITTEN,
        ),
    ],
    function: Function = "",
    command: Annotated[
        str,
        typer.Option(
            "--command",
            "-c",
            metavar="COMMAND",
            help="A shell command, run for each sample in a folder with its fields as sample.jpg and so on.",
            show_default=False,
            **WHAT,
        ),
    ] = "",
    many: Annotated[
        str,
        typer.Option(
            "--multi-command",
            "-m",
            metavar="COMMAND",
            help="As --command, but writes several samples: sample-000000.jpg, sample-000001.jpg and so on.",
            show_default=False,
            **WHAT,
        ),
    ] = "",
    decode: Decode = None,
    whole_shards: Annotated[
        bool,
        typer.Option(
            "--whole-shards", help="Call the function once per shard, with an iterator of its samples.", **WHAT
        ),
    ] = False,
    command_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="The time limit of a command for each sample.", show_default=False, **WHAT
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip samples that fail, and report them.", **WHAT)
    ] = False,
    if_changed: Annotated[
        IfChanged, typer.Option(help="How to handle finished shards made with other input or options.", **WRITTEN)
    ] = IfChanged.fault,
    compress: Compression = None,
    index: Annotated[bool, typer.Option("--index", help="Write an index next to each shard.", **WRITTEN)] = False,
    remove_old: RemoveOld = False,
    journal: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A local file that records finished shards; by default next to local shards.",
            **WRITTEN,
        ),
    ] = None,
    executor: Annotated[Workplace, typer.Option(help="Local processes, or a Dask cluster.", **WHO)] = (
        Workplace.processes
    ),
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The scheduler of the Dask cluster.", show_default=False, **WHO)
    ] = "",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="NUMBER",
            help="The number of processes, by default one per CPU; 0 uses this process. With Dask, the number of "
            "shards at a time.",
            show_default=False,
            **WHO,
        ),
    ] = None,
    shard_retries: Annotated[
        int, typer.Option(min=0, metavar="NUMBER", help="The number of retries of a failed shard.", **WHO)
    ] = 2,
    limits: Limits = None,
) -> None:
    """Apply a function or a shell command to all samples of many shards in parallel.

    Each shard gives one output shard, which appears when it is complete. After an error, Ctrl-C or kill -9, the same
    command converts only the missing shards. Failed shards are reported at the end, with exit code 1; the others are
    finished.

    A function gets the fields as bytes, or decoded with --decode. Its result is encoded by the names of its fields;
    None drops the sample. A command runs in a folder with the fields as files, sample.jpg and so on; the files sample.*
    after it ends are the new sample.
    """
    bounds = parse_limits(limits)
    work = parse_mapping(function, command, many, command_timeout, decode=decode, whole_shards=whole_shards)
    if (executor is Workplace.dask) is not bool(address):
        raise WrongUse(
            "--executor dask and --address require each other, as in --executor dask --address localhost:8786"
        )
    words = parse_decoders(decode)
    urls = options.list_shards(shards)
    if "-" in urls:
        raise WrongUse("Standard input cannot be read again when a shard is retried. Write it to a file first")
    results: dict[str, ConvertedShard] = {}
    failures: dict[str, BaseException] = {}
    skipped: dict[tuple[str, str], None] = {}
    with ExitStack() as opened:

        def take(shard: ConvertedShard) -> None:
            results[shard.source] = shard

        def skip(error: Exception) -> bool:
            skipped[type(error).__name__, message_of(error)] = None
            return True

        opened.enter_context(log_to_stderr())
        if isinstance(work, SampleCommand):
            opened.callback(work.remove_leftovers)
        dask = opened.enter_context(workplace(address, work))
        try:
            convert_shards(
                work,
                urls,
                output,
                whole_shards=whole_shards,
                decode=words,
                key_rule=options.rule,
                on_error=skip if skip_bad else "raise",
                retries=shard_retries,
                if_changed=if_changed.value,
                executor=dask,
                num_workers=(workers or None) if dask is not None else workers,
                on_result=take,
                journal=journal,
                remove_old=remove_old,
                storage_options=options.store,
                limits=bounds,
                compress=compress,  # type: ignore[arg-type]  # the writer checks it
                index=index,
            )
        except ConversionError as error:
            failures = error.failures
        except StateError as error:
            raise WrongUse(option_hint(str(error))) from None
        except ValueError as error:
            raise WrongUse(str(error)) from None
    done = [results[url] for url in urls if url in results]
    if options.as_json:
        sys.stdout.write(json.dumps(facts_of(done, failures, list(skipped)), indent=1) + "\n")
    else:
        report(done, failures, list(skipped))
    if failures:
        raise typer.Exit(FAULT_FOUND)


def parse_mapping(
    function: str,
    command: str,
    many: str,
    timeout: float | None,
    *,
    decode: list[str] | None,
    whole_shards: bool,
) -> Callable[..., Any]:
    """Return the function or command to apply to the samples."""
    if [function, command, many].count("") != 2:
        raise WrongUse("map requires exactly one of --function, --command and --multi-command")
    if function:
        if timeout is not None:
            raise WrongUse("--command-timeout requires --command or --multi-command. It cannot stop a function")
        return load_function(function)
    if decode is not None or whole_shards:
        raise WrongUse("--decode and --whole-shards require --function. Commands get the fields of one sample as files")
    try:
        return SampleCommand(command or many, several=bool(many), timeout_s=timeout)
    except ValueError as error:
        raise WrongUse(str(error)) from None


@contextmanager
def workplace(address: str, work: Callable[..., Any]) -> Iterator[Any]:
    """Yield an executor if there is a cluster."""
    if not address:
        yield None
        return
    with ExitStack() as opened:
        try:
            client = opened.enter_context(connect_dask(address))
        except ConnectionError as error:
            raise WrongUse(str(error)) from None
        if not isinstance(work, SampleCommand):
            send_module(client, work, Path.cwd())
        with client.get_executor() as executor:
            yield executor


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Print the warnings that the library logs, such as retries of a shard, to standard error."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: typer.echo(f"Warning: {on_one_line(record.getMessage())}", err=True)  # type: ignore[method-assign]  # a class would be longer
    logger = logging.getLogger("wds_datapipes")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def option_hint(message: str) -> str:
    """Return a message of `convert_shards` about an argument in terms of the option."""
    return message.replace('Pass if_changed="redo"', "Use --if-changed redo").replace(
        'if_changed="keep"', "--if-changed keep"
    )
