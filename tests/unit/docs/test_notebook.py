"""The committed notebook is as a reader gets it: no outputs, no paths of a machine."""

from __future__ import annotations

import nbformat

from tests.unit.docs.page import ROOT

FILE = ROOT / "examples" / "notebooks" / "first_run.ipynb"


def test_it_has_no_outputs_and_no_absolute_paths() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    for cell in cells:
        assert cell.outputs == [] and cell.execution_count is None
        compile(cell.source, FILE.name, "exec")
        assert not any(text in cell.source for text in ('"/', "'/"))
    assert notebook.metadata.kernelspec.name == "python3"
