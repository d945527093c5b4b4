"""Reports and workers in notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs/tutorials/notebook.ipynb"


@pytest.mark.timeout(900)  # it starts a kernel
def test_a_notebook_shows_a_report_and_its_workers_use_its_functions_and_classes() -> None:
    notebook: Any = nbformat.reads(NOTEBOOK.read_text(), 4)  # type: ignore[no-untyped-call]  # it has no types
    nbclient.NotebookClient(notebook, timeout=800, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any(output.get("text") == "{'flower': 30, 'palace': 30}\n" for output in outputs)
    shown = [output.data for output in outputs if "data" in output]
    (table,) = [data["text/html"] for data in shown if "text/html" in data]
    assert table.count("<tr>") == 3
    assert "<td>Worker 1</td>" in table
    assert "image/png" in shown[-1]
