"""The notebook runs from its first cell to its last, in a kernel as Jupyter starts one."""

import pytest

from tests.examples.commands import REPOSITORY
from tests.patience import patient


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_cell_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat  # the extra `notebook`, which `make test-all` installs
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(REPOSITORY / "examples" / "first_training.ipynb", as_version=4)
    NotebookClient(notebook, timeout=int(patient(240)), kernel_name="python3").execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert "zero3 on 2 ranks: equal" in printed
    assert printed.count("25.0%") == 4
    displays = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "display_data"
    ]
    assert displays == [], "rich displayed each rank's table, empty"
    assert "\x1b[" not in printed.split("Bytes held")[1].split("loss")[0]
