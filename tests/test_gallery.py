"""The notebooks of the gallery run from top to bottom."""

from pathlib import Path

import pytest

GALLERY = Path(__file__).resolve().parent.parent / "docs" / "gallery"
NOTEBOOKS = sorted(GALLERY.glob("*.ipynb"))


def test_every_notebook_is_listed_and_was_executed():
    nbformat = pytest.importorskip("nbformat")
    listed = (GALLERY / "index.md").read_text()
    assert len(NOTEBOOKS) == 4
    for path in NOTEBOOKS:
        assert f"({path.stem}.md)" in listed
        cells = nbformat.read(path, as_version=4).cells
        code = [cell for cell in cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in code), f"{path.name} was not executed"
        assert not any(output.output_type == "error" for cell in code for output in cell.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=100, resources=resources).execute()
