"""The notebooks are those of their pages, and run from the first cell to the last."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "build" / "notebooks.py")
made = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made)


def test_they_are_made_from_their_pages():
    """Otherwise: python docs/build/notebooks.py."""
    assert {path.stem for path in (ROOT / "notebooks").iterdir()} == set(made.PAGES)
    for page in made.PAGES:
        assert (ROOT / "notebooks" / f"{page}.ipynb").read_text() == made.notebook(page), page


@pytest.mark.slow  # a kernel of its own for each; the cells themselves run in tests/test_docs.py
@pytest.mark.parametrize("page", made.PAGES)
@pytest.mark.filterwarnings("ignore")
def test_they_run(page, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("lion_pytorch")
    notebook = nbformat.reads(made.notebook(page), 4)
    nbformat.validate(notebook)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=250, kernel_name="python3", resources=where).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
