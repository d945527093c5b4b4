"""The claims of the pages: no sentence with a figure, or with a word such as *never*, stays without a proof.

    PYTHONPATH=tests/pages python docs/claims.py docs/how-to/shuffle.md

prints what a page claims without a proof in `proofs.txt`, and which line that lacks. Without a page, it counts the
proofs of each by their kinds. With ``--digests``, it completes the lines that have only the first words of a claim.
CONTRIBUTING.md says what a proof may be.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from zlib import crc32

from page_blocks import FILE, ROOT, Block, blocks_of

#: The pages whose claims are to be proven.
CHECKED = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROOFS = Path(__file__).with_name("proofs.txt")
#: The page with a section for each file of results, which `benchmarks/report.py` writes.
REPORT = ROOT / "docs/explanation/benchmarks.md"
#: Proofs that are no place in this repository.
WORDS = {"page", "advice", "definition", "example", "method"}

#: What no single case shows.
ABSOLUTE = re.compile(r"\b(?:never|always|only|each|every|nothing|none|all|exactly|twice|half)\b", re.IGNORECASE)
IDIOM = re.compile(r"\b(?:at all|each other|not only|read-only|above all|after all)\b", re.IGNORECASE)
NUMBER = r"\d[\d,]*(?:\.\d+)?"
#: A number, and the unit of what was measured, and is proven by no block that has the number.
UNIT = "\N{MULTIPLICATION SIGN}|" + r"\s?(?:times|%|ms|µs|s|seconds|minutes|hours)(?!\w)"
TIMES = {"ms", "µs", "s"}
FIGURE = re.compile(rf"(?<![\w.:]){NUMBER}(?![\w:])(?P<unit>{UNIT})?")
COUNTED = re.compile(
    r"\b(?:two|three|four|five|six|seven|eight|nine|ten|twelve|hundreds?|thousands?|millions?) "
    r"(?:times|seconds|minutes|hours|days|bytes|requests)\b",
    re.IGNORECASE,
)
#: Numbers that are names: of models and devices, of releases, and of one thing among many.
NAME = re.compile(
    rf"\b[A-Za-z][\w/]*-[\w/]*\d+\b|\b\d+(?:\.\d+){{2,}}\b|"
    rf"\b(?:Python|torch|torchdata|webdataset|CUDA|rank|worker|host|versions?|releases?|epoch|step|exit code|level) "
    rf"{NUMBER}(?:(?:,| to| and| or) {NUMBER})*"
)
#: What a sentence tells its readers to do.
ADVICE = re.compile(
    r"(?:Add|Build|Call|Change|Check|Choose|Create|Do not|Give|Index|Install|Keep|Let|Load|Make|Pass|Prefer|Put|Read|"
    r"Run|Save|See|Set|Shuffle|Split|Start|Store|Use|Wrap|Write)\b[^,;:(]*"
)
#: A number of the code is that of a page in another unit: KiB, MiB or GiB, thousands, millions, percent, or minutes.
UNITS = (1, 2**-10, 2**-20, 2**-30, 1e-3, 1e-6, 100, 1 / 60)


def sentences_of(text: str) -> list[str]:
    """Return the sentences and tables of a page, without blocks, headings, targets of links and generated sections."""
    text = re.sub(r"<!-- begin (\w+) -->.*?<!-- end \1 -->|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}).*?^\1$|^(?:#|:)[^\n]*", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[((?:[^][]|\[[^]]*\])*)\]\([^)]*\)", r"\1", text).replace("**", "")
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text))
    found: list[str] = []
    for part in parts:
        words = re.sub(r"^(?:[-*]|\d+\.) ", "", part)
        found += [part] if part.startswith("|") else re.split(r"(?<=[.?!])\s+(?=[A-Z`(])", words)
    return [sentence for sentence in found if sentence]


def claims_of(text: str) -> list[str]:
    """Return the sentences and tables of a page that claim something."""
    return [
        sentence
        for sentence in sentences_of(text)
        if not sentence.endswith("?")
        if figures_of(sentence, text) or ABSOLUTE.search(_bare(sentence)) or COUNTED.search(_bare(sentence))
    ]


def figures_of(sentence: str, text: str) -> list[tuple[str, str]]:
    """Return the numbers in a sentence that neither name something nor are in a block of the page, and their units."""
    shown = _numbers_of_blocks(text)
    found = [(match[0].removesuffix(match["unit"] or ""), match["unit"]) for match in FIGURE.finditer(_bare(sentence))]
    numbers = [(number.replace(",", ""), (unit or "").strip()) for number, unit in found]
    return [(number, unit) for number, unit in numbers if unit or number not in shown]


def _bare(sentence: str) -> str:
    """Return a sentence without code, names, idioms and advice."""
    bare = IDIOM.sub("", NAME.sub("", re.sub(r"`[^`]*`|<[^>]*>", "", sentence)))
    return ADVICE.sub("", bare, count=1) if ADVICE.match(bare) else bare


@functools.cache
def _numbers_of_blocks(text: str) -> set[str]:
    return _numbers("".join(map(_shown, blocks_of(text))))


def _shown(block: Block) -> str:
    """Return the text of a block, and that of the file that it includes."""
    file = FILE.fullmatch(block.kind)
    included = file and file["included"]
    return block.text + ((ROOT / "docs" / included.lstrip("/")).read_text("utf-8") if included else "")


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d)[,_](?=\d)", "", text)))


@functools.cache
def read_proofs() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the proofs, by page and by the line that stands for the claim."""
    proofs: dict[str, dict[str, list[str]]] = {}
    page = claim = ""
    for line in filter(None, PROOFS.read_text("utf-8").splitlines()):
        if line.startswith("# "):
            page = line[2:]
        elif not line.startswith(" "):
            claim = line
        else:
            proofs.setdefault(page, {}).setdefault(claim, []).append(line.strip())
    return proofs


def line_of(claim: str) -> str:
    """Return the line that stands for a claim: its first words, and a digest, so that a changed claim is a new one."""
    return f"{' '.join(claim.split()[:7])} [{crc32(claim.encode()) & 0xFFFF:04x}]"


def problems(text: str, proofs: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield what a page claims without a proof, and the proofs that are none, or of nothing."""
    claims = {line_of(claim): claim for claim in claims_of(text)}
    for line, claim in claims.items():
        found = proofs.get(line, [])
        if not found:
            yield f"docs/proofs.txt lacks the line {line!r} with a proof of: {claim}"
        wrong = [proof for proof in found if not is_valid(proof)]
        yield from (f"{proof} does not exist: {claim}" for proof in wrong)
        if not wrong and any(map(has_figures, found)):
            with_figures = [*filter(has_figures, found)]
            for figure, unit in figures_of(claim, text):
                if not any(_rounds_to(value, figure) for proof in with_figures for value in figures_in(proof, unit)):
                    yield f"{figure} is not in {', '.join(found)}: {claim}"
    for line in proofs.keys() - claims:
        yield f"no claim for this line of docs/proofs.txt (docs/claims.py --digests adds a digest that lacks): {line}"


def is_valid(proof: str) -> bool:
    """Whether a proof exists."""
    if proof.split()[0] in WORDS or proof.startswith("https://"):
        return True
    place, _, name = proof.partition("::")
    if name:
        return (ROOT / place).is_file() and name in _definitions(place)
    place, _, quotient = proof.partition(": ")
    return (ROOT / place).is_file() and _numbers(quotient) <= _numbers_in(place)


def has_figures(proof: str) -> bool:
    """Whether a proof contains figures; if any proof of a sentence does, they contain all of the sentence."""
    return not (proof in WORDS or proof.startswith(("https://", "tests/", "noxfile.py")))


def figures_in(proof: str, unit: str = "") -> Iterator[float]:
    """Yield the figures in results or in a definition, and those that follow from a quotient of two results.

    Times in results are those in columns with this unit.
    """
    place, _, name = proof.partition("::")
    if name:
        yield from (value * unit for value in _constants(_definitions(place)[name]) for unit in UNITS)
        return
    place, _, quotient = proof.partition(": ")
    yield from map(float, _numbers_in(place, unit) if (ROOT / place).is_file() else _numbers(place))
    if quotient:
        first, second = map(float, quotient.split(" / "))
        yield from (first / second, 100 * first / second, 100 * abs(first / second - 1))


@functools.cache
def _definitions(place: str) -> dict[str, ast.AST]:
    """Return what a module defines, at any depth, by name."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(ast.parse((ROOT / place).read_text("utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(node.name, node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in ast.walk(target):
                    found.setdefault(ast.unparse(name), node)
    return found


def _constants(definition: ast.AST) -> Iterator[float]:
    """Yield the numbers in a definition, and those that it computes from numbers, such as ``1 << 20``."""
    for node in ast.walk(definition):
        if isinstance(node, (ast.Constant, ast.BinOp)) and all(
            isinstance(part, (ast.Constant, ast.BinOp, ast.operator)) for part in ast.walk(node)
        ):
            value = eval(compile(ast.Expression(node), "", "eval"))
            if isinstance(value, (int, float)):
                yield value


@functools.cache
def _numbers_in(place: str, unit: str = "") -> set[str]:
    """Return the numbers in a file, or in the section of the page that is written from these results.

    Args:
        place: the file.
        unit: of a section, only numbers in columns with this unit of time; all if it is none.
    """
    name = Path(place).stem
    section = re.search(rf"<!-- begin {name} -->(.*)<!-- end {name} -->", REPORT.read_text("utf-8"), re.DOTALL)
    if section and unit in TIMES:
        return _numbers(" ".join(_cells(section[1], unit)))
    return _numbers(section[1] if section else (ROOT / place).read_text("utf-8"))


def _cells(section: str, unit: str) -> Iterator[str]:
    """Yield what has a unit in a section: the cells of columns and rows, and numbers before it."""
    yield from re.findall(rf"({NUMBER})\s?{unit}\b", section)
    for table in re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE):
        headings, *rows = (line.strip("|").split("|") for line in table.splitlines())
        for row in rows:
            named = (cell for heading, cell in zip(headings, row, strict=True) if re.search(rf"\b{unit}\b", heading))
            yield from row if re.search(rf"\b{unit}\b", row[0]) else named


def _rounds_to(value: float, figure: str) -> bool:
    return f"{value:.{len(figure.partition('.')[2])}f}" == figure


def kind_of(proof: str) -> str:
    """Return the kind of a proof: a word, a source elsewhere, a test, a result, or other code."""
    kinds = {"https:": "source", "tests/": "test", "benchmarks/results/": "result", "docs/images/": "result"}
    other = proof.split()[0] if proof.split()[0] in WORDS else "code"
    return next((kind for start, kind in kinds.items() if proof.startswith(start)), other)


def add_digests() -> None:
    """Add the digest to each line of `proofs.txt` that has only the first words of a claim."""
    lines, claims = PROOFS.read_text("utf-8").splitlines(), list[str]()
    for number, line in enumerate(lines):
        if line.startswith("# "):
            claims = claims_of((ROOT / line[2:]).read_text("utf-8"))
        elif not line.startswith(" ") and not re.search(r" \[\w{4}\]$", line):
            lines[number] = next((line_of(claim) for claim in claims if line and claim.startswith(line)), line)
    PROOFS.write_text("\n".join((*lines, "")), "utf-8")


def main() -> None:
    """Add digests, print the problems of some pages, or the counts of all."""
    if sys.argv[1:] == ["--digests"]:
        add_digests()
        return
    proofs = read_proofs()
    for name in sys.argv[1:]:
        print("\n".join(problems((ROOT / name).read_text("utf-8"), proofs.get(name, {}))))
    for name, found in proofs.items() if not sys.argv[1:] else ():
        kinds = Counter(kind for some in found.values() for kind in {kind_of(proof) for proof in some})
        print(f"{name:60} {len(found):4} ", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))


if __name__ == "__main__":
    main()
