"""The facts of stages are in one place, apply to the stage's own loop, and are inherited."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data.datapipes.iter
from pipeline_table import EXACT, STREAMS, write_shards
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper
from torch.utils.data.graph_settings import apply_random_seed

import wds_datapipes
from wds_datapipes import Member, ShardList, Stage, pipes
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.foreign_stages import STAGES, declared
from wds_datapipes.pipes.graph import PipelineGraph, graph_of
from wds_datapipes.pipes.inspection import count_yielded, loop_of
from wds_datapipes.pipes.roles import PROMISES, Buffer, Loader, Role, Source, Splitter, Transform
from wds_datapipes.pipes.state.pipeline_state import check_resharding, reshard_states, save_state
from wds_datapipes.shards.position import Resharding

PACKAGE = Path(wds_datapipes.__file__).parent
MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
#: The modules that may distinguish classes of stages: the table, the base class, and the tables of names.
ALLOWED = {
    *("wds_datapipes.pipes.foreign_stages", "wds_datapipes.pipes.stage", "wds_datapipes.__init__"),
    "wds_datapipes.pipes.__init__",
    "wds_datapipes.foreign_names",
    "wds_datapipes.__main__",  # runs the command line
}

ROLES = (Source, Transform, Buffer, Splitter, Loader)


def kinds_of(package: str) -> dict[str, type[Any]]:
    """Return the classes of stages by name, of this package or another one."""
    for name in pipes.__all__:
        getattr(pipes, name)  # imports its module
    found: dict[str, type[Any]] = {}
    left: list[type[Any]] = [IterDataPipe, MapDataPipe]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__.partition(".")[0] == package:
            found[kind.__name__] = kind
    return found


def is_stage_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, IterDataPipe) and value is not IterDataPipe


def switches_in(module: str, tree: ast.Module) -> Iterator[str]:
    """Describe the code of a module that distinguishes classes of stages."""
    names = kinds_of("wds_datapipes").keys() | set().union(*STAGES.values())
    names |= {name.removesuffix("IterDataPipe") for name in names}
    space: dict[str, Any] = {}
    with suppress(ImportError):  # of an optional package
        space = vars(importlib.import_module(module))
    names -= {name for name, value in space.items() if getattr(value, "__module__", "") == module}
    exported = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    listed = {id(each) for node in exported for each in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in listed and node.value in names:
            yield f"names {node.value!r} in line {node.lineno}"
        asked: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = node.args[1:]
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            asked = list(node.comparators)
        for each in itertools.chain.from_iterable(map(ast.walk, asked)):
            value = space.get(each.id) if isinstance(each, ast.Name) else None
            if is_stage_class(value) and value.__module__ != module:
                yield f"asks for a {each.id} in line {node.lineno}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", sorted(MODULES.keys() - ALLOWED))
def test_no_module_distinguishes_classes_of_stages(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    assert [*switches_in(module.removesuffix(".__init__"), tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        'ENDLESS = {"CyclerIterDataPipe"}',
        'def f(pipe): return name_of(pipe) == "DirectoryShards"',
        'def f(pipe): return type(pipe).__name__ in ("ShardLoader", "RecordLoader")',
        "def f(pipe): return isinstance(pipe, (str, ShardList))",
        "def f(pipe): return type(pipe) is ShardList",
    ],
)
def test_such_a_distinction_would_be_noticed(code: str) -> None:
    assert [*switches_in("wds_datapipes.tools.bench.measure", ast.parse(code))]  # which imports ShardList


def test_the_table_declares_what_exists_of_classes_that_exist() -> None:
    for package in ("torch", "torchdata"):
        kinds = kinds_of(package)
        for name, row in STAGES[package].items():
            assert loop_of(kinds[name]) in (kinds[name], None)
            own = {each for kind in row.__mro__[: row.__mro__.index(Role)] for each in vars(kind)}
            assert own - set(dir(Role)) <= {"__annotations__", "__dict__", "__weakref__", "alternative", "pipe"}


def registered() -> list[type[Any]]:
    kinds = {getattr(build, "__wrapped__", None) for build in IterDataPipe.functions.values()}
    return sorted((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Stage)), key=str)


@pytest.mark.parametrize("kind", registered())
def test_a_subclass_keeps_the_declarations_unless_it_has_another_loop(kind: Any) -> None:
    class Same(kind):  # type: ignore[misc]
        pass

    class Other(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            yield from ()

    class Again(Other):
        is_stateless = True

        def __iter__(self) -> Iterator[Any]:
            yield from ()

    class Below(Again):
        pass

    for name, unknown in PROMISES.items():
        assert getattr(Same, name) is getattr(kind, name)
        assert getattr(Other, name) is unknown
        assert getattr(Below, name) is (True if name == "is_stateless" else unknown)


def test_a_subclass_of_a_foreign_stage_keeps_its_row_unless_it_has_another_loop() -> None:
    class Same(Mapper):  # type: ignore[type-arg]
        pass

    class Other(Mapper):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            yield from ()

    source: IterableWrapper[Any] = IterableWrapper([])
    assert declared(Same(source, len)).is_stateless
    assert not declared(Other(source, len)).is_stateless
    assert declared(Other(source, len)).draws_globally


@pytest.fixture
def shards(folder: Path) -> None:
    write_shards()


def subclass_of(kind: type[Any]) -> type[Any]:
    """Return a trivial subclass that can be pickled, because torch pickles stages to find them."""
    name = f"Own{kind.__name__}"
    return globals().setdefault(name, type(name, (kind,), {"__module__": __name__}))  # type: ignore[no-any-return]


def with_subclasses(pipe: Any) -> Any:
    """Return the pipeline with each stage replaced by one of a trivial subclass."""
    for stage in graph_of(pipe).stages:
        if isinstance(stage, Stage):
            stage.__class__ = subclass_of(type(stage))
    return pipe


def after_some_items(pipe: Any) -> tuple[Any, Any, list[bool]]:
    """Return the state after some items, what fewer or more workers resume from, and whether torch counts members."""
    apply_random_seed(pipe, torch.Generator().manual_seed(5))
    items = iter(pipe)
    for _ in range(4):
        next(items)
    state = json.loads(json.dumps(save_state(pipe)))
    resharded: Any = "refused"
    with suppress(StateError):
        check_resharding(pipe)
        resharded = reshard_states(pipe, Resharding([state], lambda _: (), 3, range(3)))
    readers = [stage for stage in graph_of(pipe).stages if declared(stage).member_reader()]
    return state, resharded, [count_yielded(reader) > 0 for reader in readers]


@pytest.mark.parametrize("case", [*EXACT, *STREAMS])
@pytest.mark.usefixtures("shards")
def test_a_pipeline_of_subclasses_has_the_same_states_and_the_same_fast_path(case: str) -> None:
    build = EXACT.get(case) or STREAMS[case]
    expected = after_some_items(build())
    assert not any(expected[2])
    assert after_some_items(with_subclasses(build())) == expected


@pytest.mark.usefixtures("shards")
def test_a_reader_with_another_loop_is_read_by_that_loop() -> None:
    from wds_datapipes.pipes.shards.load_wds_shards import ShardLoader

    class FirstMembers(ShardLoader):
        def __iter__(self) -> Iterator[Any]:
            for _, members in self.open_reader():
                yield from itertools.islice(map(Member._make, members), 4)

    pipe = FirstMembers(ShardList("a0.tar")).group_samples()
    whole = [*ShardList("a0.tar").load_wds_shards().group_samples()]
    assert 0 < len([*pipe]) < len(whole)
    with pytest.raises(StateError, match="only directly after load_wds_shards"):
        PipelineGraph(pipe).stateful_stages()


def test_the_contract_of_a_users_stage_has_five_declarations() -> None:
    text = inspect.getdoc(Stage) or ""
    attributes = text.partition("Attributes:")[2].partition("Examples:")[0]
    documented = [line.split(":")[0].strip() for line in attributes.splitlines() if ":" in line and line[4] != " "]
    assert len(documented) <= 5
    assert set(documented) <= set(vars(Role))


#: The maximum numbers of attributes and methods of a role. Do not raise them for a single stage.
MOST_FACTS, MOST_QUESTIONS = 14, 27


def test_the_engine_asks_for_few_facts() -> None:
    questions = [name for name, value in vars(Role).items() if inspect.isfunction(value) and name[:1] != "_"]
    assert len(Role.__annotations__) <= MOST_FACTS
    assert len(questions) <= MOST_QUESTIONS
    for role in ROLES:
        assert vars(role).keys() - {"__module__", "__doc__", "__annotations__"} <= vars(Role).keys()


def test_each_stage_of_this_package_has_a_role() -> None:
    for kind in kinds_of("wds_datapipes").values():
        if issubclass(kind, Stage) and "__iter__" in vars(kind):
            assert {*ROLES} & {*kind.__mro__}, kind


def test_a_state_that_cannot_be_empty_is_an_error_that_says_so() -> None:
    class Counting(Stage[Any]):
        def __init__(self, source: Any) -> None:
            self.source = source

        def __iter__(self) -> Iterator[Any]:
            yield from self.source

        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"]

    with pytest.raises(StateError, match=r"Counting\.load_state_dict\({}\) raised KeyError\('count'\)"):
        Counting(IterableWrapper([])).reset_state()
