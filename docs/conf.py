"""How Sphinx builds this documentation; `nox -s docs` does."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util import inspect, logging

sys.path.insert(0, str(Path(__file__).parent))

from llms import write_llms
from redirects import write_redirects
from terms import first_uses

project = "wds-datapipes"
author = "The wds-datapipes authors"
release = version = version_of(project)

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["examples"]
# A reference that leads nowhere is a warning, and `nox -s docs` makes each warning an error.
nitpicky = True

# Pages are Markdown. `:::{note}` begins a directive, and `[text](page.md#section)` leads to a heading.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
#: In seconds for each cell; with the default of 30, a busy machine would not finish.
nb_execution_timeout = 600

# Docstrings in the style of Google. A name in single backticks is code, and leads to what has this name.
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Packages that need another torchdata, or 2 GB.
autodoc_mock_imports = ["torchdata.nodes", "nvidia"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

copybutton_prompt_is_regexp = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "

html_theme = "pydata_sphinx_theme"
html_title = project
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
# Pages that are no part of a section have none to list.
html_sidebars: dict[str, list[str]] = {"examples": [], "glossary": [], "changelog": []}
html_theme_options = {
    "github_url": "https://github.com/wds-datapipes/wds-datapipes",
    "navbar_align": "left",
    "show_toc_level": 2,
}


def find_by_last_names(app: Any, environment: Any, node: Any, content: Any) -> Any:
    """Lead a name in a docstring or a signature to the documented object whose full name ends with it.

    Docstrings say `ShardList`, and a signature names the module that defines a class. Other types of a signature are
    text.
    """
    if node.get("refdomain") != "py":
        return None
    domain = environment.get_domain("py")
    target = node["reftarget"]
    is_type = node["reftype"] == "class"
    ending = "." + (target.rpartition(".")[2] if is_type else target)
    names = [name for name, found in domain.objects.items() if name.endswith(ending) and not found.aliased]
    if len(names) == 1:
        return domain.resolve_xref(environment, node["refdoc"], app.builder, "obj", names[0], node, content)
    return content if is_type else None


def check_reference(_: Any, environment: Any) -> None:
    """Warn about public names that the reference lacks."""
    documented = {name.rpartition(".")[2] for name in environment.get_domain("py").objects}
    for name in ("", ".errors", ".index", ".pipes", ".testing", ".writing"):
        module = import_module(f"wds_datapipes{name}")
        names = getattr(module, "__all__", [name for name in vars(module) if name.endswith("Error")])
        if missing := set(names) - documented:
            logging.getLogger(__name__).warning("the reference lacks %s of %s", sorted(missing), module.__name__)


def definitions(app: Any) -> dict[str, nodes.section]:
    """Return the sections of the glossary, by the term that each defines."""
    sections = app.env.get_doctree("glossary").findall(nodes.section)
    return {section[0].astext().lower(): section for section in sections if isinstance(section.parent, nodes.section)}


def link_terms(app: Any, page: nodes.document, name: str) -> None:
    """Lead the first use of each term in the text of a page to the glossary."""
    if app.builder.format != "html" or name.startswith(("reference/", "glossary", "changelog")):
        return
    defined = definitions(app)
    glossary = app.builder.get_relative_uri(name, "glossary")
    linked = {link["refuri"].partition("#")[2] for link in page.findall(nodes.reference) if "glossary" in str(link)}
    unused = {term for term, section in defined.items() if not linked.intersection(section["ids"])}
    for text in [text for paragraph in page.findall(nodes.paragraph) for text in paragraph.findall(nodes.Text)]:
        if isinstance(text.parent, (nodes.paragraph, nodes.strong)) and not is_within(text, nodes.table):
            pieces: list[nodes.Node] = []
            end = 0
            for use in first_uses(str(text), unused):
                section = defined[use.term]
                target = {
                    "refuri": f"{glossary}#{section['ids'][0]}",
                    "reftitle": section[1].astext().partition(". ")[0],
                }
                word = text[use.start : use.end]
                pieces += [
                    nodes.Text(text[end : use.start]),
                    nodes.reference("", word, internal=True, classes=["term"], **target),
                ]
                unused.remove(use.term)
                end = use.end
            if pieces:
                text.parent.replace(text, [*pieces, nodes.Text(text[end:])])


def is_within(node: Any, kind: type) -> bool:
    """Whether a node is part of one of some kind."""
    return node is not None and (isinstance(node, kind) or is_within(node.parent, kind))


def show_arguments(_app: Any, what: str, _name: str, found: Any, _options: Any, shown: str | None, result: Any) -> Any:
    """Show the arguments of ``__init__`` if a class inherits a ``__new__`` that takes any, as from a patched class."""
    if what != "class" or not (shown or "").startswith("(*"):
        return None
    if getattr(found, "_is_protocol", False):  # no class to create
        return "", result
    arguments = inspect.signature(found.__init__, bound_method=True)
    return inspect.stringify_signature(arguments, show_return_annotation=False, unqualified_typehints=True), result


def write_further_files(app: Any, error: Exception | None) -> None:
    """Write what is no page of Sphinx: the old addresses, and `llms.txt`."""
    if error is None and app.builder.format == "html":
        for problem in write_redirects(Path(app.outdir)):
            logging.getLogger(__name__).warning(problem)
        write_llms(Path(app.outdir), html_baseurl)


def setup(app: Any) -> None:
    """Connect the functions above to Sphinx, which calls this one."""
    app.connect("autodoc-process-signature", show_arguments)
    app.connect("missing-reference", find_by_last_names)
    app.connect("env-check-consistency", check_reference)
    app.connect("doctree-resolved", link_terms)
    app.connect("build-finished", write_further_files)
