"""Completion in shells, and the program without the package that reads its commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wds_datapipes.tools.cli.app import COMMANDS, build_app

#: Words before the cursor, and how bash completes the last one.
COMPLETED = {
    ("l",): "ls",
    ("create", "im"): "images imagenet",
    ("cache", "w"): "warm",
    ("ls", "--key-r"): "--key-rule",
    ("ls", "--key-rule", ""): "first-dot last-dot",
    ("ls", "a-0.tar", "a-1"): "a-1.tar",
    ("cat", "a-0.tar", "-o", "a-2"): "a-2.tar",
    ("map", "a-0.tar", "--on-error", "s"): "skip",
}


@pytest.mark.usefixtures("shards")
def test_bash_completes_commands_options_choices_and_files(folder: Path) -> None:
    command = [sys.executable, "-m", "wds_datapipes", "--install-completion"]
    environ = {**os.environ, "HOME": str(folder), "SHELL": "/bin/bash"}
    subprocess.run(command, env=environ, capture_output=True, check=True)
    tries = "".join(
        f"COMP_WORDS=(wds-datapipes {' '.join(f'{word!r}' for word in words)}); COMP_CWORD={len(words)}\n"
        'COMPREPLY=(); _wds_datapipes; echo "${COMPREPLY[@]}"\n'
        for words in COMPLETED
    )
    done = subprocess.run(
        ["bash", "-c", f". ~/.bashrc\n{tries}"], env=environ, capture_output=True, text=True, check=True
    )
    assert dict(zip(COMPLETED, done.stdout.splitlines(), strict=True)) == COMPLETED


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_for_other_shells_have_all_commands(shell: str) -> None:
    script = build_app().generate_completion(shell=shell)  # type: ignore[arg-type]  # a literal
    assert [name for name in COMMANDS if name.split()[-1] not in script] == []
    assert "storage-options" in script


def test_a_missing_package_is_one_line_that_names_the_extra(folder: Path) -> None:
    Path("cyclopts.py").write_text("raise ImportError('none', name='cyclopts')")
    done = subprocess.run(
        [sys.executable, "-m", "wds_datapipes", "ls", "a.tar"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: 'cyclopts' is needed to run commands")
    assert done.stderr.endswith('python -m pip install "wds-datapipes[cli]"\n')
    assert done.stderr.count("\n") == 1
