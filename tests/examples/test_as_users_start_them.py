"""The notebook and the dry run, as their users start them."""

import runpy

import pytest

from tests.examples.commands import REPOSITORY, set_arguments
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


@pytest.mark.slow
def test_it_prints_a_row_for_each_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(REPOSITORY / "examples" / "dry_run_100b.py")
    options = {"num-layers": 4, "stages": 2, "tensor": 8, "world": 4096, "num-microbatches": 4}
    set_arguments(monkeypatch, path, *(f"--{name}={value}" for name, value in options.items()))
    runpy.run_path(path, run_name="__main__")
    output = capsys.readouterr().out
    assert "parameters on 4,096 ranks: pp 2, dp 256, tp 8, ZeRO stage 1" in output
    assert "1f1b, 4 microbatches, 1,024 samples a step; idle 20.0%" in output
    rows = [line.split()[0] for line in output.splitlines() if "GiB" in line]
    assert rows == ["0", "1", "least", "most"]
