"""YAML with plain values, from authors who may be untrusted."""

from __future__ import annotations

from typing import Any

#: The maximum depth of nested lists and mappings. PyYAML needs quadratic time for deep ones.
MAX_DEPTH = 32
#: Errors that PyYAML raises besides its own, for example for an invalid date or an empty number.
YAML_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


def parse_plain_yaml(yaml: Any, text: Any) -> Any:
    """Parse YAML with plain values.

    Aliases are rejected, because a few lines of them can expand to more values than fit into memory, and so is deep
    nesting.

    Args:
        yaml: the PyYAML module.
        text: the YAML text, or an object whose ``read`` returns it piece by piece.

    Raises:
        ValueError: the text is not YAML with plain values, has an alias, or is nested too deeply.
    """

    class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # the package is optional
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"aliases are not supported, but there is one:\n{self.peek_event().start_mark}")
            if self.depth == MAX_DEPTH:
                raise ValueError(
                    f"lists and mappings are nested more than {MAX_DEPTH} deep:\n{self.peek_event().start_mark}"
                )
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        return yaml.load(text, PlainLoader)
    except (yaml.YAMLError, *YAML_ERRORS) as error:
        cause = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise ValueError(cause) from error
