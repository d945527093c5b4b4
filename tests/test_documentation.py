"""Every page of the documentation is a script: its blocks of code are run, and their output is compared.

CONTRIBUTING.md describes what a page may contain.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from claims import CHECKED, claims_of, line_of, problems, read_proofs
from llms import pages, write_llms
from page_blocks import ROOT, blocks_of, tabs_of
from page_runs import EXAMPLE, PAGES_OF_PEERS, environment, run_page, run_script, scripts_of
from prepared_programs import prepared_programs
from redirects import read_redirects
from terms import first_uses

from wds_datapipes.tools.cli.demo import demo, write_photographs

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = [script for page in PAGES for script in scripts_of(page)]
#: The page whose commands are started as users start them.
STARTED_ANEW = "docs/how-to/cache-shards.md"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with ``page``, which runs a script, and ``wds-datapipes``; neither imports the package again."""
    with prepared_programs(tmp_path_factory.mktemp("programs"), environment()) as folder:
        yield folder


def of_peers(script: str) -> bool:
    """Whether a session of `peers` runs the script of a page."""
    return any(script in scripts for scripts in PAGES_OF_PEERS.values())


@pytest.mark.timeout(900)  # some pages start many processes
@pytest.mark.parametrize("script", [script for script in SCRIPTS if not of_peers(script)])
def test_a_page_runs(script: str, programs: Path, tmp_path: Path) -> None:
    if script == "README.md":  # whose block reads the output of the command above it
        demo_folder = tmp_path / inspect.signature(demo).parameters["output_dir"].default
        demo_folder.mkdir()
        write_photographs(demo_folder)
    run_script(script, tmp_path, None if script == STARTED_ANEW else programs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_the_program_that_writes_its_shards(page: Path) -> None:
    """Readers have only the files that the page makes, or asks them to make."""
    text = page.read_text(encoding="utf-8")
    if "data/train-" in text and page != ROOT / "docs" / EXAMPLE:
        assert f"{EXAMPLE}#example-shards" in text.partition("data/train-")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_programs_of_a_page_import_torchdata_after_the_package(page: Path) -> None:
    """Otherwise, readers see a banner of torchdata, which the page does not show."""
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    files = [block.text for block in blocks if block.kind == "{code-block} python"]
    for program in ["".join(block.text for block in blocks if block.kind == "python"), *files]:
        first = re.search(r"^ *(?:from|import) (torchdata|wds_datapipes)\b", program, re.MULTILINE)
        assert first is None or first[1] == "wds_datapipes"


def test_the_sessions_of_peers_run_existing_pages() -> None:
    assert sum(map(of_peers, SCRIPTS)) == sum(map(len, PAGES_OF_PEERS.values()))


def test_each_tab_of_a_page_runs_with_what_is_in_no_tab(tmp_path: Path) -> None:
    text = TABS.replace("@", ":")
    assert tabs_of(text) == ["One", "Two"]
    for tab in tabs_of(text):
        run_page(text, tmp_path, tab=tab)
        with pytest.raises(AssertionError, match=f"(?s)It prints:\\s+{tab}"):
            run_page(text.replace(f"{tab} tab", "no tab"), tmp_path, tab=tab)


def test_old_addresses_lead_to_sections_of_pages() -> None:
    redirects = read_redirects()
    for old, (name, tab, section) in redirects.items():
        assert not (ROOT / f"docs/{old}.md").exists()
        text = (ROOT / f"docs/{name}.md").read_text("utf-8")
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert not tab or f":sync: {tab.partition('=')[2]}\n" in text
        assert not section or section in {re.sub(r"[^\w-]", "", line.lower().replace(" ", "-")) for line in headings}


def test_llms_txt_lists_each_page(tmp_path: Path) -> None:
    docs = ROOT / "docs"
    names = {page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.[mi][dp]*")}
    assert {page.name for page in pages()} == names
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
    write_llms(tmp_path, "")
    listed = re.findall(r"(?m)^(?:- |## )\[.+?\]\(([\w./-]+)\)", (tmp_path / "llms.txt").read_text("utf-8"))
    assert {address.rpartition(".")[0] for address in listed} == names - {"index"}
    written = [tmp_path / address for address in listed if address.endswith(".md")]
    assert not [page for page in written if "{literalinclude}" in page.read_text("utf-8")]
    assert len(written) > 40


def test_the_first_use_of_a_term_is_found() -> None:
    text = "Ranks share a global batch; each rank-local batch has samples of all indexes, with a key."
    terms = ["rank", "batch", "global batch", "sample", "index", "key", "lane"]
    found = [(text[use.start : use.end], use.term) for use in first_uses(text, terms)]
    assert found == [
        ("Ranks", "rank"),
        ("global batch", "global batch"),
        ("batch", "batch"),
        ("samples", "sample"),
        ("indexes", "index"),
    ]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_a_page_beside_the_site_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert len(links) > 10


def test_the_readme_contains_the_tested_commands() -> None:
    commands = [block.text for block in blocks_of((ROOT / "README.md").read_text("utf-8")) if block.kind == "shell"]
    assert commands == [
        'python -m pip install ".[demo]" -c constraints.txt && wds-datapipes demo\n',
        "python -m pip install nox && nox -s tests\n",
    ]
    assert commands[1].strip() in (ROOT / ".ci/run").read_text("utf-8")


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_claims_only_what_is_proven(page: Path) -> None:
    proofs = read_proofs().get(page.relative_to(ROOT).as_posix(), {})
    assert list(problems(page.read_text("utf-8"), proofs)) == []


@pytest.mark.parametrize(
    ("text", "proof", "problem"),
    [
        ("It reads each shard once. It may fail.", "page", None),
        ("Read each shard with 3 workers of torch 2.4.", None, None),
        ("Read it once, since each shard is large.", None, r"lacks the line 'Read it once, .* \[\w{4}\]' with a proof"),
        ("```python\nread(3)\n```\n\nHere, 3 workers read.", None, None),
        ("```python\nread(3)\n```\n\nIt is 3 times as fast.", None, "a proof of: It is 3"),
        ("| a | b |\n|---|---|\n| c | none |", None, r"a proof of: \| a"),
        ("It reads each shard once.", "tests/test_documentation.py::test_nothing", "test_nothing does not exist"),
        ("It may fail.", "page", "no claim for this line .*: It may fail. "),
        ("It is 13 times as fast.", "benchmarks/results/reading.json", None),
        ("Some 999 samples wait.", "benchmarks/results/state.json", None),
        ("Saving takes 999 ms.", "benchmarks/results/state.json", "999 is not in"),
        ("It is 13.4 times as fast.", "benchmarks/results/reading.json", "13.4 is not in"),
        ("It has 1.4 times as many.", "benchmarks/results/gpu.json: 1526 / 1119", None),
        ("It has 1.4 times as many.", "benchmarks/results/gpu.json: 1527 / 1119", "does not exist"),
        ("At most 8 GiB are read.", "wds_datapipes/io/read_limits.py::ReadLimits", None),
        ("At most 7 GiB are read.", "wds_datapipes/io/read_limits.py::ReadLimits", "7 is not in"),
    ],
)
def test_a_claim_without_a_proof_is_found(text: str, proof: str | None, problem: str | None) -> None:
    claim = (claims_of(text) or [text])[0]
    found = list(problems(text, {line_of(claim): [proof]} if proof else {}))
    assert len(found) == (problem is not None)
    if problem:
        assert re.search(problem, found[0])


def test_the_figures_of_the_benchmarks_are_those_of_their_results() -> None:
    report, results = ROOT / "benchmarks/report.py", sorted((ROOT / "benchmarks/results").glob("*.json"))
    assert results
    subprocess.run([sys.executable, report, "--check", *results], check=True)


#: A page with two tabs, whose colons are `@`.
TABS = """\
```python
word = "tab"
```
@@@@{tab-set}
@@@{tab-item} One
```python
print("One", word)
```
```text
One tab
```
@@@
@@@{tab-item} Two
```python
word = word[:3]
```
@@@
@@@@
@@@@{tab-set}
@@@{tab-item} Two
```python
print("Two", word)
```
```text
Two tab
```
@@@
@@@@
"""

GOOD = """\
```python
name = "page"
print(name)
```
```text
page
```
```console
$ echo 'a  b'
a  b
```
```{code-block} python
:caption: answer.py

answer = 42
```
```python
import answer
print(answer.answer)
```
```text
42
```
"""


@pytest.mark.parametrize(
    ("right", "wrong", "text"),
    [
        ('name = "page"', "name = 1 / 0", 'page.py", line 2.*ZeroDivisionError'),
        ("\npage\n", "\npages\n", r"It prints:\s+page"),
        ("$ echo 'a  b'", "$ false | true", "CalledProcessError"),
        ("{code-block} python", "{literalinclude} /examples/no.py", "line 12: there is no file /examples/no.py"),
        ("```python", "``` python", "line 1: a block is one of"),
        ("\n```\n```text", "\n```\n\n```text\n```\n```text", "there is no block whose output this is"),
    ],
)
def test_a_bad_page_fails(right: str, wrong: str, text: str, tmp_path: Path) -> None:
    assert right in GOOD
    with pytest.raises(AssertionError, match=f"(?s){text}"):
        run_page(GOOD.replace(right, wrong), tmp_path)
