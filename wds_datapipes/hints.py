"""Hints: advice in messages to pass an argument, spelled for the function or the command that the user called.

A reader raises an error without knowing who called it: ``end_marker`` is an argument of ``.load_wds_shards()``, a field
of `IndexOptions` for `build_indexes`, and ``--end-marker`` for a command. So a message keeps its hints, and the
function or the command writes them again as it takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Argument:
    """What advice may name.

    Attributes:
        home: a function or a stage that takes it, named if the one that the user called does not.
        page: the page of the documentation that explains it.
        option: the option of the command line; by default, the name of the argument with dashes.
        kind: the class that has the value of a hint as a field, if the argument is an object.
    """

    home: str
    page: str
    option: str = ""
    kind: str = ""


READING, GROUPING, INDEXING = (
    "read it with .load_wds_shards",
    "read it with .group_samples",
    "build it with build_indexes",
)
WRITING, CONVERTING = "write it with ShardWriter", "convert it with convert_shards"

#: All arguments that hints name.
ARGUMENTS = {
    "allow_pickle": Argument("read it with .wds_decode", "docs/explanation/security.md"),
    "columns": Argument(INDEXING, "docs/how-to/choose-and-mix-samples.md"),
    "endings": Argument("find files with find_images", "docs/how-to/create-a-dataset.md", option="--ending"),
    "end_marker": Argument(READING, "docs/explanation/shard-format.md"),
    "has_classes": Argument("find files with find_images", "docs/how-to/create-a-dataset.md", option="--no-classes"),
    "if_changed": Argument(CONVERTING, "docs/how-to/convert-shards.md"),
    "ignore_zeros": Argument(READING, "docs/explanation/shard-format.md"),
    "index_dir": Argument(INDEXING, "docs/how-to/build-indexes.md"),
    "journal": Argument(CONVERTING, "docs/how-to/convert-shards.md"),
    "key_rule": Argument(GROUPING, "docs/how-to/choose-fields.md"),
    "limits": Argument(READING, "docs/explanation/security.md", option="--limit", kind="ReadLimits"),
    "num_workers": Argument("read it with ShardReadingService", "docs/how-to/load-with-workers.md"),
    "old_shards": Argument(WRITING, "docs/how-to/write-shards.md"),
    "on_duplicate": Argument(GROUPING, "docs/explanation/shard-format.md"),
    "on_error": Argument(READING, "docs/how-to/inspect-and-repair-shards.md"),
    "rebuild": Argument(INDEXING, "docs/explanation/index-format.md"),
    "rekey": Argument("write it with create_shards", "docs/how-to/create-a-dataset.md"),
    "remove_old": Argument(CONVERTING, "docs/reference/command-line.md"),
    "resume": Argument(WRITING, "docs/how-to/write-shards.md"),
    "storage_options": Argument(READING, "docs/how-to/read-from-stores.md"),
}


@dataclass(frozen=True)
class Hint:
    """Advice to pass an argument.

    >>> str(Hint("end_marker", '"optional"')), str(Hint("limits", "member_bytes"))
    ('pass end_marker="optional"', 'pass limits=ReadLimits(member_bytes=...)')

    Args:
        argument: its name.
        value: its value, as in Python; for an object, the name of its field.
        within: the argument and the class of the object that has it as a field, if all functions take it so.
    """

    argument: str
    value: str = "..."
    within: str = ""

    def __str__(self) -> str:
        text = f"{self.argument}={self.code}"
        return f"pass {self.within}({text})" if self.within else f"pass {text}"

    @property
    def code(self) -> str:
        """The value in Python."""
        kind = ARGUMENTS[self.argument].kind if self.argument in ARGUMENTS else ""
        return f"{kind}({self.value}=...)" if kind else self.value

    def as_option(self, options: Collection[str]) -> str:
        """Return the hint as an option of a command, or for Python if the command has none.

        >>> END_MARKER.as_option(["--end-marker"]), LIMITS["headers"].as_option(["--limit"]), REDO.as_option([])
        ('use --end-marker optional', 'use --limit headers=...', 'in Python, pass if_changed="redo"')
        """
        known = ARGUMENTS[self.argument]
        option, value = known.option or f"--{self.argument}".replace("_", "-"), self.value.strip('"')
        is_switch = value == "True" or (value == "False" and option.startswith("--no-"))
        if option not in options or (value in ("None", "False") and not is_switch):
            return f"in Python, {self}"
        if is_switch:
            return f"use {option}"
        if known.kind:
            return f"use {option} {value}=..."
        return f"use {option} {value if '{' in value else value.replace('_', '-')}"


class Message(str):
    """A message with its hints, which can be spelled in another way.

    It is an ordinary text, which advises arguments by their names. Parts that are messages themselves keep their hints.

    >>> message = Message("It has no end marker: ", END_MARKER, " if this is intended")
    >>> message
    'It has no end marker: pass end_marker="optional" if this is intended'
    >>> message.spell(lambda hint: f"use --{hint.argument}")
    'It has no end marker: use --end_marker if this is intended'
    >>> message.hints
    (Hint(argument='end_marker', value='"optional"', within=''),)
    """

    __slots__ = ("parts",)

    parts: tuple[str | Hint, ...]

    def __new__(cls, *parts: object) -> Self:
        """Join texts, hints and messages."""
        found: list[str | Hint] = []
        for part in parts:
            found += part.parts if isinstance(part, Message) else [part if isinstance(part, Hint) else str(part)]
        return cls.of("".join(map(str, found)), found)

    @classmethod
    def of(cls, text: str, parts: Collection[str | Hint]) -> Self:
        """Return a text that stands for these parts, such as one with the traceback of another process."""
        made = super().__new__(cls, text)
        made.parts = tuple(parts)
        return made

    @property
    def hints(self) -> tuple[Hint, ...]:
        """The hints, in order."""
        return tuple(part for part in self.parts if isinstance(part, Hint))

    def spell(self, phrase_of: Callable[[Hint], str]) -> Self:
        """Return the message with other phrases for its hints."""
        text = "".join(phrase_of(part) if isinstance(part, Hint) else part for part in self.parts)
        return self.of(text, self.parts)

    def replaced(self, replace: Callable[[str], str]) -> Self:
        """Return the message with texts that a function returns for its own; itself if they are the same."""
        plain = str.__str__(self)
        if (text := replace(plain)) == plain:
            return self
        return self.of(text, [part if isinstance(part, Hint) else replace(part) for part in self.parts])

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Message.of, (str.__str__(self), self.parts)


END_MARKER = Hint("end_marker", '"optional"')
FINAL = Hint("end_marker", '"final"')
IGNORE_ZEROS = Hint("ignore_zeros", "True")
ON_DUPLICATE = Hint("on_duplicate", '"first"')
FIRST_DOT, LAST_DOT = Hint("key_rule", "first_dot"), Hint("key_rule", "last_dot")
WRITE_LAST_DOT, WRITE_NO_RULE = (Hint("key_rule", rule, "options=WriteOptions") for rule in ("last_dot", "None"))
INDEX_DIR = Hint("index_dir")
REBUILD = Hint("rebuild", "True")
COLUMNS = Hint("columns")
REMOVE_OLD, OLD_SHARDS = Hint("remove_old", "True", "job=JobOptions"), Hint("old_shards", '"remove"')
ENDINGS, NO_CLASSES = Hint("endings"), Hint("has_classes", "False")
JOURNAL, RESUME = Hint("journal", '"shards.journal"', "job=JobOptions"), Hint("resume", '"shards.journal"')
REKEY = Hint("rekey", '"{number:08d}"')
REDO, KEEP = Hint("if_changed", '"redo"'), Hint("if_changed", '"keep"')
ALLOW_PICKLE, WRITE_PICKLE = (Hint("allow_pickle", "True", within) for within in ("", "options=WriteOptions"))
REGION = Hint("storage_options", '{"client_kwargs": {"region_name": ...}}')
SKIP = Hint("on_error", '"skip"')
IN_PROCESS = Hint("num_workers", "0")
LIMITS = {
    name: Hint("limits", name)
    for name in (
        *("member_bytes", "name_bytes", "headers", "header_bytes", "gap_bytes", "tail_bytes", "expansion"),
        *("window_bytes", "image_pixels"),
    )
}
