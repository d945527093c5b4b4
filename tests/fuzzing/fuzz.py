"""Fuzzes the readers of untrusted data with atheris: ``python tests/fuzzing/fuzz.py --seconds 60 tar index``.

Without names, it fuzzes all targets in turn, each in a separate process. Interesting inputs are kept in
``corpus/TARGET`` below the folder, and each input that fails in ``crashes/TARGET``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

#: The time limit of one input in seconds, and the memory limit in MB, including torch.
HANG_S, MEMORY_MB = 20, 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="what to fuzz, if not all")
    parser.add_argument("--seconds", type=int, default=60, help="how long, each (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path(".fuzzing"), help="where inputs are kept (default: %(default)s)"
    )
    parser.add_argument("--one", type=Path, help="run the input in this file alone, without atheris")
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        from fuzz_loop import run

        run(table()[arguments.targets[0]], arguments.one.read_bytes())
        return
    if arguments.within:
        fuzz(arguments.targets[0], arguments.seconds, arguments.folder)
    names = arguments.targets or list(names_of_targets())
    if failed := [name for name in names if not fuzzed(name, arguments.seconds, arguments.folder)]:
        sys.exit(f"Found: {' '.join(failed)}. The inputs are in {arguments.folder.resolve()}/crashes")


def names_of_targets() -> list[str]:
    """List the targets in another process, because this one must not import what atheris instruments."""
    code = "import fuzz; print(*fuzz.table())"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return found.stdout.split()


def fuzzed(name: str, seconds: int, folder: Path) -> bool:
    """Fuzz one target, print the result on one line, and return whether it passed."""
    command = [sys.executable, __file__, name, "--within", f"--seconds={seconds}", f"--folder={folder}"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    status = re.findall(r"#(\d+)\s+(?:DONE|pulse|NEW|REDUCE).*cov: (\d+) ft: (\d+) corp: (\d+)", done.stderr)
    runs, covered, features, kept = status[-1] if status else ("0",) * 4
    if done.returncode:
        print(done.stderr[-6000:])
    found = "nothing found" if not done.returncode else "FOUND, see above"
    speed = int(runs) // max(seconds, 1)
    print(f"{name}: {runs} runs, {speed}/s, cov {covered}, features {features}, corpus {kept}: {found}", flush=True)
    return not done.returncode


def fuzz(name: str, seconds: int, folder: Path) -> None:
    """Fuzz one target in this process, and exit."""
    import atheris

    with atheris.instrument_imports(include=["wds_datapipes"]):
        target = table()[name]
    from fuzz_loop import run

    corpus, crashes = folder / "corpus" / name, folder / "crashes" / name
    for made in (corpus, crashes):
        made.mkdir(parents=True, exist_ok=True)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        changed: bytes = target.change(data, rng)
        return changed[:max_size]

    with tempfile.TemporaryDirectory() as made_here:
        seeds = Path(made_here) / "seeds"
        seeds.mkdir()
        for number, data in enumerate(target.seeds()):
            (seeds / str(number)).write_bytes(data)
        words = Path(made_here) / "words"
        tokens = [token for token in target.tokens if len(token) <= 64]
        words.write_text("".join('"' + "".join(f"\\x{each:02x}" for each in token) + '"\n' for token in tokens))
        longest = max(1 << 14, 2 * max(len(data) for data in target.seeds()))
        options = [
            f"-max_total_time={seconds}",
            f"-timeout={HANG_S}",
            f"-rss_limit_mb={MEMORY_MB}",
            f"-max_len={longest}",
        ]
        options += [f"-dict={words}", f"-artifact_prefix={crashes}/", "-print_final_stats=1", "-close_fd_mask=0"]
        atheris.Setup(
            [sys.argv[0], *options, str(corpus), str(seeds)], lambda data: run(target, data), custom_mutator=change
        )
        atheris.Fuzz()


def table() -> dict[str, Any]:
    """Import all targets, and return them by name."""
    from targets import TARGETS

    return TARGETS


if __name__ == "__main__":
    main()
