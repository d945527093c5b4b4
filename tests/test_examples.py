"""The examples: killed runs resume, and the loss decreases."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.metadata import distribution
from itertools import chain
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import pytest
import torch
from page_runs import environment
from PIL import Image
from prepared_programs import prepared_programs
from sweeps import WHOLE

EXAMPLES = Path(__file__).parents[1] / "docs/examples"
IMAGENET = EXAMPLES / "imagenet"
#: Programs that run on each rank.
SCRIPTS = Path(__file__).parent / "examples"
#: The imports of a training script, which take longer than everything else.
IMPORTED = ("torch._dynamo", "torch.distributed.tensor", "torch.nn.parallel", "av")
TRAIN, VALIDATION = 45, 13
CLASSES = ("n01440764", "n01443537")
#: A run that takes longer than this counts as a hang, in seconds.
LIMIT_S = 200
LOADERS = ("files", "shards", "indexed")
OPTIONS = "-j 1 --epochs 2 -b 8 --size 32 --num-classes 2 --seed 1 --lr 0.05 -p 1 --save-every 2 --mixup 1 --cutmix 1"


class Data(NamedTuple):
    images: Path
    shards: Path
    programs: Path

    def of(self, loader: str) -> str:
        return str(self.images if loader == "files" else self.shards)


class Done(NamedTuple):
    codes: list[int]
    printed: str
    errors: list[str]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with ``page``, which runs a script, and ``wds-datapipes``."""
    with prepared_programs(tmp_path_factory.mktemp("programs"), environment(), *IMPORTED) as folder:
        yield folder


@pytest.fixture(scope="module")
def data(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Parts of two photographs, of different sizes, as files in one folder per class and as shards."""
    images, shards = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("shards")
    rng = random.Random(0)
    files = Path(str(distribution("scikit-learn").locate_file("sklearn/datasets/images")))
    photographs = [Image.open(files / name) for name in ("china.jpg", "flower.jpg")]
    for split, count in (("train", TRAIN), ("val", VALIDATION)):
        for name in CLASSES:
            (images / split / name).mkdir(parents=True)
        for number in range(count):
            width, height, label = rng.randint(48, 120), rng.randint(48, 120), number % 2
            left, top = rng.randint(0, 640 - width), rng.randint(0, 427 - height)
            part = photographs[label].crop((left, top, left + width, top + height))
            part.save(images / split / CLASSES[label] / f"{split}_{number}.JPEG")
    environ = {**environment(), "PATH": f"{programs}:{os.environ['PATH']}", "SAMPLES_PER_SHARD": "8"}
    subprocess.run(["sh", IMAGENET / "make_shards.sh", images, shards], env=environ, check=True)
    return Data(images, shards, programs)


def free_port() -> int:
    """Return a free port below those that the system assigns, so it stays free."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def run_ranks(programs: Path, ranks: int, *command: str | Path, folder: Path | None = None) -> Done:
    """Run a script on several ranks in a folder, as torchrun does."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    # Files instead of pipes, which workers of a killed rank would keep open until they notice, after 5 s.
    with ExitStack() as opened:
        outputs, errors = ([opened.enter_context(TemporaryFile("w+")) for _ in range(ranks)] for _ in range(2))
        processes = [
            subprocess.Popen(
                [programs / "page", *command],
                env={**environment(), **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=outputs[rank],
                stderr=errors[rank],
                cwd=folder,
            )
            for rank in range(ranks)
        ]
        codes = [process.wait(LIMIT_S) for process in processes]
        for file in outputs + errors:
            file.seek(0)
        return Done(codes, "".join(file.read() for file in outputs), [file.read() for file in errors])


def train(
    data: Data, loader: str, output: Path, *options: str, ranks: int = 2, die: tuple[int, int] | None = None
) -> Done:
    script: list[str | Path] = [IMAGENET / "main.py"]
    if die:
        script = [SCRIPTS / "killed_at_step.py", *map(str, die), *script]
    script += ["--loader", loader, *OPTIONS.split(), "--output", output, *options, data.of(loader)]
    return run_ranks(data.programs, ranks, *script)


def trail(done: Done) -> list[str]:
    """The printed losses and accuracies, without the times."""
    return [re.sub(r": [\d.]+ s, data [\d.]+ s", "", line) for line in done.printed.splitlines()]


@pytest.fixture(scope="module")
def read(data: Data, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """What two ranks read with each loader, and what one rank reads when it resumes from their states."""
    states = tmp_path_factory.mktemp("states") / "states.json"
    found = []
    for ranks in (2, 1):
        done = run_ranks(data.programs, ranks, SCRIPTS / "imagenet_loaders.py", data.images, data.shards, states)
        assert done.codes == [0] * ranks, done.errors
        found.append(json.loads(done.printed))
    return found[0], found[1]


def flat(batches: Any) -> list[str]:
    return list(chain.from_iterable(batches))


@pytest.mark.parametrize("loader", LOADERS)
def test_each_loader_yields_each_image_once_in_an_epoch_and_resumes_it(loader: str, read: Any) -> None:
    ranks = [rank[loader] for rank in read[0]]
    expected = sorted(f"train_{number}" for number in range(TRAIN))
    assert sorted(flat(ranks[0]["first epoch"]) + flat(ranks[1]["first epoch"])) == expected
    assert len(ranks[0]["first epoch"]) == len(ranks[1]["first epoch"])
    assert sorted(flat(chain.from_iterable(rank["begun"] + rank["resumed"] for rank in ranks))) == expected
    assert ranks[0]["begun"] != ranks[0]["first epoch"][:3]
    assert all(rank["resumed like uninterrupted"] for rank in ranks)


@pytest.mark.parametrize("loader", LOADERS)
def test_one_rank_resumes_with_the_rest_of_two(loader: str, read: Any) -> None:
    two, (one,) = read
    rest = flat(chain.from_iterable(rank[loader]["resumed"] for rank in two))
    assert sorted(flat(one[loader])) == sorted(rest)
    if loader != "shards":  # the others have global batches
        merged = [sorted(a + b) for a, b in zip(two[0][loader]["resumed"], two[1][loader]["resumed"], strict=True)]
        assert [sorted(batch) for batch in one[loader]] == merged


def test_all_loaders_validate_the_same_pixels_once(read: Any) -> None:
    ranks, _ = read
    files, shards, indexed = (
        sorted(map(tuple, ranks[0][x]["validation"] + ranks[1][x]["validation"])) for x in LOADERS
    )
    assert files == shards == indexed
    assert sorted(key for key, _, _ in files) == sorted(f"val_{number}" for number in range(VALIDATION))
    assert all(label == int(key.removeprefix("val_")) % 2 for key, label, _ in files)


@pytest.mark.timeout(5 * LIMIT_S)
@pytest.mark.parametrize("loader", LOADERS if WHOLE else ["indexed"])
def test_a_run_that_is_killed_and_resumed_ends_like_an_undisturbed_one(loader: str, data: Data, tmp_path: Path) -> None:
    whole = train(data, loader, tmp_path / "whole")
    assert whole.codes == [0, 0], whole.errors
    expected = torch.load(tmp_path / "whole/checkpoint.pt", weights_only=True)
    assert expected["epoch"] == 2
    step = random.randrange(3, expected["step"])

    died = train(data, loader, tmp_path / "killed", die=(1, step))
    assert died.codes[1] == -9, died.errors
    assert died.codes[0] != 0
    resumed = train(data, loader, tmp_path / "killed", "--resume", "auto")
    assert resumed.codes == [0, 0], resumed.errors
    found = torch.load(tmp_path / "killed/checkpoint.pt", weights_only=True)
    assert found["model"].keys() == expected["model"].keys()
    assert all(torch.equal(found["model"][name], weights) for name, weights in expected["model"].items()), step
    first, *lines = trail(resumed)
    assert first.startswith("Resuming from ")
    assert lines == trail(whole)[-len(lines) :], step
    assert f"on {VALIDATION} images" in lines[-1]

    evaluated = train(data, loader, tmp_path, "-e", "--resume", str(tmp_path / "whole/checkpoint.pt"), ranks=1)
    assert evaluated.codes == [0], evaluated.errors
    accuracies = re.compile("Acc.*")
    assert accuracies.findall(evaluated.printed) == accuracies.findall(lines[-1])


def test_a_checkpoint_of_another_loader_is_an_error(data: Data, tmp_path: Path) -> None:
    state = {"options": {"arch": "tiny", "loader": "files"}}
    torch.save(state, tmp_path / "checkpoint.pt")
    done = train(data, "indexed", tmp_path, "--resume", "auto", ranks=1)
    assert done.codes == [1]
    assert "was saved with --loader files, not indexed" in done.errors[0]


def test_ranks_that_cannot_share_a_batch_are_an_error(data: Data, tmp_path: Path) -> None:
    done = train(data, "files", tmp_path, "-b", "9")
    assert done.codes == [1, 1]
    assert "2 ranks cannot share batches of 9" in done.errors[0]


def losses_of(done: Done) -> dict[int, float]:
    return {
        int(step): float(loss) for step, loss in re.findall(r"^Step (\d+): loss ([\d.]+)", done.printed, re.MULTILINE)
    }


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("name", ["audio", "chat", "clip_image_text", "language_model", "vision_language"])
def test_an_example_learns_and_resumes_as_if_it_had_not_been_killed(name: str, programs: Path, tmp_path: Path) -> None:
    def run(folder: str, *killing: str | Path, ranks: int = 2) -> Done:
        (tmp_path / folder).mkdir(exist_ok=True)
        return run_ranks(programs, ranks, *killing, EXAMPLES / f"{name}.py", folder=tmp_path / folder)

    whole = run("whole")
    assert (whole.codes, whole.errors) == ([0, 0], ["", ""])
    losses = losses_of(whole)
    assert sum([*losses.values()][-8:]) < 0.7 * sum([*losses.values()][:8])
    busiest = [float(work) for work in re.findall(r"busiest rank ([\d.]+)", whole.printed)]
    assert len(busiest) == len(losses) * (name == "vision_language")
    assert sum(busiest) <= 1.1 * len(busiest)

    step = random.randrange(len(losses) // 2, len(losses) - 1)  # rank 0 may take the last one by itself
    killed = run("killed", SCRIPTS / "killed_at_step.py", "1", str(step))
    assert killed.codes[1] == -9, killed.errors
    assert killed.codes[0] != 0
    copytree(tmp_path / "killed", tmp_path / "on one rank")
    resumed = run("killed")
    assert (resumed.codes, resumed.errors) == ([0, 0], ["", ""])
    # Rank 0 may not have printed its last lines when it fails.
    lines = whole.printed.splitlines()
    assert killed.printed.splitlines() == lines[: len(losses_of(killed))], step
    assert resumed.printed.splitlines() == lines[-len(losses_of(resumed)) :], step
    # Rank 0 may finish and save the step at whose end rank 1 was killed, if the gradients had been exchanged.
    assert 1 < min(losses_of(resumed)) <= step + 2
    if "IndexedSamples" in (EXAMPLES / f"{name}.py").read_text():
        alone = run("on one rank", ranks=1)
        assert alone.codes == [0], alone.errors
        assert losses_of(alone) == pytest.approx({n: losses[n] for n in losses_of(resumed)}, rel=0.01, abs=0.01)


@pytest.mark.timeout(4 * LIMIT_S)
def test_the_stages_of_a_pipeline_have_the_same_rows_and_a_run_resumes_on_other_pipelines(
    programs: Path, tmp_path: Path
) -> None:
    def run(folder: str, ranks: int, stages: int, *killing: str | Path) -> tuple[Done, list[list[list[str]]]]:
        """Return the run, and the rows of each of its steps: those of one pipeline after those of another."""
        script: list[str | Path] = [SCRIPTS / "recorded_rows.py", tmp_path / "rows", *killing]
        script += [EXAMPLES / "pipeline_parallel.py", "--stages", str(stages)]
        (tmp_path / folder).mkdir(exist_ok=True)
        done = run_ranks(programs, ranks, *script, folder=tmp_path / folder)
        assert killing or (done.codes, done.errors) == ([0] * ranks, [""] * ranks)
        records = [(tmp_path / "rows" / str(rank)).read_text().splitlines() for rank in range(ranks)]
        if not killing:
            assert len({*map(len, records)}) == 1, "each rank has as many steps"
        steps = []
        for of_ranks in zip(*records, strict=not killing):
            pipelines = [{*of_ranks[first : first + stages]} for first in range(0, ranks, stages)]
            assert [*map(len, pipelines)] == [1] * len(pipelines), "all stages of a pipeline have the same rows"
            steps.append([*chain.from_iterable(json.loads(rows) for [rows] in pipelines)])
        return done, steps

    def check(first: int, done: Done, steps: list[list[list[str]]]) -> None:
        """Compare a run with the uninterrupted one of a single process, from some step on."""
        assert steps == rows[first : first + len(steps)]
        expected = {step: loss for step, loss in losses.items() if first < step <= first + len(losses_of(done))}
        assert losses_of(done) == pytest.approx(expected, abs=0.01)

    whole, rows = run("alone", 1, 1)
    losses = losses_of(whole)
    assert len(losses) == len(rows) > 24
    assert sum([*losses.values()][-8:]) < 0.5 * sum([*losses.values()][:8])
    for first, (ranks, stages, victim) in zip((0, 8), ((2, 2, 1), (4, 2, 2)), strict=True):
        killed, begun = run(
            "run", ranks, stages, SCRIPTS / "killed_at_step.py", str(victim), str(random.randrange(9, 15))
        )
        assert killed.codes[victim] == -9, killed.errors
        assert 0 not in killed.codes
        assert len(begun) > 8  # each rank has taken the rows of all steps before that of the kill, and maybe its own
        check(first, killed, begun)
    for ranks, stages in ((4, 4), (2, 1)):
        copytree(tmp_path / "run", tmp_path / f"{stages}")
        rest, steps = run(f"{stages}", ranks, stages)
        assert len(steps) == len(rows) - 16
        check(16, rest, steps)


@pytest.mark.parametrize("name", ["detection_ragged_boxes", "hub_dataset", "video_clips"])
def test_the_loss_of_an_example_falls(name: str, programs: Path, tmp_path: Path) -> None:
    command: list[str | Path] = [programs / "page", EXAMPLES / f"{name}.py", "--epochs", "3"]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.7 * losses[0]
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_copies_of_the_hub_resumes_after_it_is_killed(programs: Path, tmp_path: Path) -> None:
    def run(folder: str, *killing: str | Path) -> Done:
        options = ("--epochs", "2", "--folder", tmp_path / folder)
        return run_ranks(programs, 1, *killing, EXAMPLES / "hub_dataset.py", *options, folder=tmp_path)

    whole = run("run")
    assert (whole.codes, whole.errors) == ([0], [""])
    for name in ("checkpoint.pt", "copies"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    assert run("run", SCRIPTS / "killed_at_step.py", "0", str(random.randrange(6, 38))).codes == [-9]
    resumed = run("run")
    assert (resumed.codes, resumed.errors) == ([0], [""])
    assert whole.printed.endswith(resumed.printed)
    assert resumed.printed


#: The examples of tutorials and how-to pages.
ELSEWHERE = ("train", "cut_clips")


def test_every_example_is_on_its_page() -> None:
    page = (EXAMPLES.parent / "examples.md").read_text(encoding="utf-8")
    for file in [*EXAMPLES.rglob("*.py"), *EXAMPLES.rglob("*.sh")]:
        assert f"{{literalinclude}} /examples/{file.relative_to(EXAMPLES)}" in page or file.name.startswith(ELSEWHERE)
