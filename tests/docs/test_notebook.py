"""The notebook runs from top to bottom, and its stored outputs are those of a real run."""

from __future__ import annotations

import copy
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "demos" / "Projection_Kernel_Demo.ipynb"


@pytest.fixture(scope="module")
def stored():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.mark.slow
def test_the_notebook_runs(gpt2_small, smollm2, stored):
    """Its cells assert their numbers. The models are asked for to skip where one is missing."""
    notebook = copy.deepcopy(stored)
    # The kernel is a process of its own: there, too, the working copy is to be tested.
    use_working_copy = (
        "import sys\nsys.modules.pop('transformer_lens_overlay', None)\n"
        f"sys.path.insert(0, {str(ROOT / 'overlay')!r})\nimport transformer_lens_overlay\n"
        f"transformer_lens_overlay.install({str(ROOT / 'transformer_lens/tools/analysis')!r})"
    )
    notebook.cells.insert(0, nbformat.v4.new_code_cell(use_working_copy))
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    client = NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources)
    executed = client.execute()
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


def test_stored_outputs_are_of_one_run_from_top_to_bottom(stored):
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
