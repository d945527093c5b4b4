"""Reports and workers in notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs/tutorials/notebook.ipynb"


@pytest.mark.timeout(900)  # it starts a kernel
def test_a_notebook_shows_a_report_and_its_workers_use_its_functions_and_classes() -> None:
    import nbclient
    import nbformat

    notebook: Any = nbformat.reads(NOTEBOOK.read_text(), 4)  # type: ignore[no-untyped-call]  # it has no types
    nbclient.NotebookClient(notebook, timeout=800, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    (text,) = [output.text for output in outputs if "palace" in output.get("text", "")]
    assert text.startswith("{'flower': 30, 'palace': 30}\n1 epoch: 60 items")
    assert "image/png" in [output.data for output in outputs if "data" in output][-1]
