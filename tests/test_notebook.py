"""Samples and reports in notebooks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.testing import build_shard

NOTEBOOK = Path(__file__).parents[1] / "docs/tutorials/notebook.ipynb"


def photo() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (90, 60), (200, 30, 30)).save(file, "jpeg")
    return file.getvalue()


@pytest.fixture
def url(tmp_path: Path) -> str:
    samples: list[dict[str, bytes | str]] = [
        {"__key__": f"k{n}", "jpg": photo(), "cls": str(n), "txt": "<b>"} for n in range(5)
    ]
    return str(build_shard(tmp_path / "a.tar", samples))


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "wds_datapipes.notebook")
    yield shell
    shell.run_line_magic("unload_ext", "wds_datapipes.notebook")
    InteractiveShell.clear_instance()


def html(shell: InteractiveShell, value: object) -> str | None:
    formatter: Any = shell.display_formatter
    data, _ = formatter.format(value)
    found: str | None = data.get("text/html")
    return found


def test_the_extension_shows_encoded_and_decoded_samples(url: str, shell: InteractiveShell) -> None:
    samples = ShardList(url).load_wds_shards().group_samples()
    encoded, decoded = list(samples), list(samples.wds_decode("torchrgb"))
    for sample in (encoded[3], decoded[3]):
        shown = html(shell, sample)
        assert shown is not None
        assert "data:image/jpeg;base64," in shown
        assert ">k3<" in shown
        assert "&lt;b&gt;" in shown
    together = html(shell, encoded)
    assert together is not None
    assert together.count("data:image/jpeg") == 5
    many = html(shell, encoded * 6)
    assert many is not None
    assert "and 6 more" in many


@pytest.mark.parametrize("value", [{}, {"a": 1}, [], [1], [{"a": 1}], [{"__key__": "a"}, 7]])
def test_other_values_are_left_to_ipython(shell: InteractiveShell, value: object) -> None:
    assert html(shell, value) is None


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((12, 16), np.uint8),
        np.zeros((12, 16, 3), np.uint8),
        np.zeros((12, 16, 1), np.uint8),
        torch.zeros(3, 12, 16, dtype=torch.uint8),
        torch.zeros(1, 12, 16),
        torch.ones(4, 12, 16, dtype=torch.bfloat16),
        Image.new("L", (16, 12)),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'shape', '')}",
)
def test_arrays_of_pixels_are_shown_as_pictures(shell: InteractiveShell, value: Any) -> None:
    shown = html(shell, {"__key__": "a", "image": value})
    assert shown is not None
    assert "data:image/png" in shown


@pytest.mark.parametrize("value", [torch.zeros(3, 4, 5) - 1, torch.zeros(0, 3, 3), np.array("x"), object(), [[1], {}]])
def test_other_values_of_a_sample_are_described(shell: InteractiveShell, value: Any) -> None:
    shown = html(shell, {"__key__": "a", "value": value})
    assert shown is not None
    assert "<img" not in shown


def test_a_report_is_a_table() -> None:
    service = ShardReadingService(num_workers=2)
    with DataLoader2(IterableWrapper(list(range(10))).sharding_filter(), reading_service=service) as loader:
        assert len(list(loader)) == 10
        shown = loader.reading_service.report()._repr_html_()
    assert shown.count("<tr>") == 3
    assert "<td>Worker 1</td>" in shown


@pytest.mark.timeout(900)  # it starts a kernel
def test_workers_use_the_functions_and_classes_of_a_notebook(tmp_path: Path) -> None:
    notebook: Any = nbformat.reads(NOTEBOOK.read_text(), 4)  # type: ignore[no-untyped-call]  # it has no types
    nbclient.NotebookClient(notebook, timeout=800, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any(output.get("text") == "{'flower': 30, 'palace': 30}\n" for output in outputs)
    assert [output.data["text/html"][:4] for output in outputs if "data" in output] == ["<div", "<p>1", "<div"]
