"""The command ``steps``: print the samples of training steps, given a checkpoint."""

from __future__ import annotations

import json as json_format
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch

from wds_datapipes.errors import plural
from wds_datapipes.io.sidecars import write_sidecar
from wds_datapipes.loading.checkpoint.format import STATE
from wds_datapipes.tools.cli.errors import FAULT_FOUND, WrongUse, printable
from wds_datapipes.tools.cli.options.values import FileOrUrl, load_builder, load_function, metavar, wrong_use
from wds_datapipes.tools.cli.printing import print_error, print_json, print_table
from wds_datapipes.tools.cli.show import sheet_as_html
from wds_datapipes.tools.runs.provenance import as_markdown
from wds_datapipes.tools.runs.provenance import provenance as provenance_of
from wds_datapipes.tools.runs.steps import RunSteps, StepSample
from wds_datapipes.types import Sample
from wds_datapipes.writing import TarWriter

#: The columns of the table.
COLUMNS = ("step", "rank", "worker", "dataset", "shard", "number", "key")


def steps(
    checkpoint: FileOrUrl,
    pipeline: str,
    /,
    *,
    step: Annotated[str | None, metavar("STEP")] = None,
    find: Annotated[list[str] | None, metavar("KEY")] = None,
    no_keys: bool = False,
    tar: Annotated[FileOrUrl | None, metavar("FILE")] = None,
    show: Annotated[FileOrUrl | None, metavar("FILE")] = None,
    replay: Annotated[str | None, metavar("MODULE:FUNCTION")] = None,
    provenance: bool = False,
    json: bool = False,
) -> None:
    """Print the samples of a training step, given a checkpoint.

    The step may be before or after the checkpoint. The keys come from the indexes of the dataset. The function builds
    the pipeline as for training, with IndexedSamples or as a stream with .log_samples(positions=); it is not read.

    Args:
        checkpoint: A file, written by torch.save or in JSON, with the state of a loader at any depth.
        pipeline: MODULE:FUNCTION, a function without arguments that returns the pipeline of the run.
        step: The step, counted from 0 at the beginning of the run, or FIRST:END, without END itself.
        find: Print only samples with this key; may be repeated.
        no_keys: Leave out the keys, so that no index is read.
        tar: Copy the samples, in order, to a tar archive with the keys STEP/PLACE/KEY.
        show: Write a self-contained HTML page of the samples.
        replay: Run the pipeline on the samples again, with the same random crops, and call a function
            with each item, such as one that runs the model or opens a debugger.
        provenance: Instead of a step, print what the run had seen at the checkpoint, in Markdown: its datasets, their
            samples and epochs, and its phases with their weights.
        json: Print each sample, or the provenance, as JSON.
    """
    if provenance is (step is not None):
        raise WrongUse("Use either --step or --provenance")
    if provenance:
        with wrong_use():
            facts = provenance_of(load_builder(pipeline, "PIPELINE")(), read_state(checkpoint))
        print_json(facts) if json else sys.stdout.write(f"{as_markdown(facts)}\n")
        return
    numbers = parse_steps(step or "")
    if no_keys and find:
        raise WrongUse("--find needs the keys that --no-keys leaves out")
    build, receive = load_builder(pipeline, "PIPELINE"), load_function(replay or "builtins:print", "--replay")
    with wrong_use():
        run = RunSteps(build(), read_state(checkpoint))
    wanted = {*find} if find else None
    found = [
        (number, each)
        for number in numbers
        for each in run.samples(number, keys=not no_keys)
        if wanted is None or each.key in wanted
    ]
    if json:
        for number, each in found:
            print_json({"step": number, **each._asdict()}, indent=None)
    elif found:
        print_table([COLUMNS, *(row_of(number, each) for number, each in found)], left=(3, 4, 6))
    if tar is not None:
        with TarWriter(tar) as writer:
            for number, place, sample in read(run, numbers, wanted):
                writer.write({**sample, "__key__": f"{number}/{place:05}/{sample['__key__']}"})
    if show is not None:
        samples = [sample for _, _, sample in read(run, numbers, wanted)]
        page = sheet_as_html(samples, f"step {step} of {checkpoint}", {"samples": f"{len(samples):,}"})
        write_sidecar(show, page.encode("utf-8", "replace"))
    for number in numbers if replay else ():
        for _, item in run.replay(number):
            receive(item)
    if wanted and not found:
        print_error(f"none of {plural(len(numbers), 'step')} had a sample with such a key", "Note")
        raise SystemExit(FAULT_FOUND)


def read(run: RunSteps, steps: range, wanted: Collection[str] | None) -> Iterator[tuple[int, int, Sample]]:
    """Yield the samples of steps, or those with some keys, each with its step and its place in it."""
    for step in steps:
        for place, sample in enumerate(run.read(step)):
            if wanted is None or sample["__key__"] in wanted:
                yield step, place, sample


def row_of(step: int, sample: StepSample) -> tuple[str, ...]:
    """Return the cells of a sample."""
    mark = " (padding)" if sample.is_padding else ""
    numbers = (str(each) for each in (step, sample.rank, sample.worker))
    return (*numbers, sample.dataset, printable(sample.shard), str(sample.number), f"{printable(sample.key)}{mark}")


def parse_steps(text: str) -> range:
    """Parse ``--step``.

    >>> parse_steps("7"), parse_steps("7:9")
    (range(7, 8), range(7, 9))

    Raises:
        WrongUse: it is neither a number nor a range.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, end = (0, 0) if match is None else (int(match[1]), int(match[2] or int(match[1]) + 1))
    if end <= first:
        raise WrongUse(f"--step must be a number from 0, or FIRST:END with a larger END, not {text!r}")
    return range(first, end)


def read_state(path: str) -> Mapping[str, Any]:
    """Return the state of a loader in a file.

    Raises:
        WrongUse: the file cannot be read, or has no state, or several.
    """
    checked = wrong_use(f"{path} is not a file of torch.save or JSON: ", OSError, RuntimeError, EOFError)
    with checked, Path(path).open("rb") as file:
        is_json = file.read(1) in b"{["
        file.seek(0)
        content = json_format.load(file) if is_json else torch.load(file, map_location="cpu", weights_only=True)
    states = {each[STATE]: each for each in states_in(content)}
    if len(states) != 1:
        raise WrongUse(f"{path} contains {plural(len(states), 'state')} of loaders instead of one")
    return next(iter(states.values()))


def states_in(content: Any) -> list[Mapping[str, Any]]:
    """Return the states of loaders in a checkpoint, at any depth."""
    if isinstance(content, Mapping):
        if STATE in content:
            return [content]
        content = content.values()
    elif not isinstance(content, list | tuple):
        return []
    return [state for each in content for state in states_in(each)]
