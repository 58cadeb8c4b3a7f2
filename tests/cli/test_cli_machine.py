"""`lightning-shard doctor`, `strategies` and `completion`."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_shard.cli import main
from lightning_shard.cli.completion import whole_parser
from lightning_shard.cli.parsers import HOMES, LIGHTNINGS, SHELLS, TEXTS
from lightning_shard.tools.doctor import communication
from lightning_shard.tools.doctor.host import Finding
from tests.cli.test_cli import LIGHT, run_alone, set_arguments


def test_every_subcommand_has_a_home() -> None:
    assert set(HOMES) == set(TEXTS)
    assert all(find_spec(f"lightning_shard.cli.{home}") for home in HOMES.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["strategies"], "hybrid_parallel     HybridParallelStrategy"),
        (["strategies", "--json"], '"name": "in_process"'),
        (["doctor", "--help"], "--measure FILE"),
        (["completion", "--help"], "{bash,zsh,fish}"),
    ],
)
def test_what_there_is_is_told_without_torch(arguments: list[str], said: str) -> None:
    finished = run_alone("-c", LIGHT, *arguments)
    assert finished.returncode == 0, finished.output
    assert said in finished.output
    assert "imported []" in finished.output


BEFORE_TORCH = """
import sys
from lightning_shard.cli import machine
rooms = machine._rooms()
for _ in range(3):
    title, look = next(rooms)
    print(title, len(list(look())) > 0)
print("torch" in sys.modules)
"""


def test_the_doctor_says_what_needs_no_torch_before_it_imports_it() -> None:
    finished = run_alone("-c", BEFORE_TORCH)
    assert finished.output == "Software True\nHost True\nLauncher True\nFalse\n"


def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    set_arguments(monkeypatch, "lightning-shard", *arguments)
    status = main()
    return status, capsys.readouterr().out


def test_the_doctor_looks_at_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    status, told = run_here(monkeypatch, capsys, "doctor", "--json")
    findings = json.loads(told)["findings"]
    subjects = {one["subject"] for one in findings}
    assert {"torch", "shared memory", "clock", "this directory", "network interface"} <= subjects
    assert {"ports", "GPUs", "backend gloo", "backend mpi", "backend in_process"} <= subjects
    assert all(one["advice"] for one in findings if one["state"] in ("warning", "failure"))
    assert status == 0


def test_a_failure_has_an_exit_code_and_is_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Finding(subject="ports", state="failure", found="none", advice="Open one.")
    monkeypatch.setattr(communication, "network", lambda: iter([bad]))
    status, told = run_here(monkeypatch, capsys, "doctor")
    assert status == 1
    assert "x   ports" in told
    assert "Open one." in told


def test_a_measured_profile_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_shard.planning.machine import machine_profile
    from lightning_shard.tools.doctor import measuring

    h100 = machine_profile("h100")
    monkeypatch.setattr(measuring, "measured_machine", lambda **given: h100)
    path = tmp_path / "here.json"
    _, told = run_here(monkeypatch, capsys, "doctor", "--measure", str(path))
    assert machine_profile(path) == h100
    assert "989,000.0 GFLOP/s in bfloat16, 67,000.0 in float32" in told


def test_a_backend_that_cannot_measure_is_an_error_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--measure", str(tmp_path / "x"), "--backend", "in_process"]
    set_arguments(monkeypatch, "lightning-shard", *arguments)
    assert main() == 1
    assert "ConfigError: got the backend 'in_process'" in capsys.readouterr().err


def test_the_completed_parser_has_every_subcommand_and_name() -> None:
    parser = whole_parser()
    parsed = parser.parse_args(["fit", "--trainer.strategy", "zero3_offload_in_process"])
    assert vars(parsed)["trainer.strategy"] == "zero3_offload_in_process"
    for name in (*LIGHTNINGS, *TEXTS):
        with pytest.raises(SystemExit, match="0"):
            parser.parse_args([name, "--help"])


def test_without_shtab_completion_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    set_arguments(monkeypatch, "lightning-shard", "completion", "bash")
    assert main() == 1
    assert "pip install 'lightning-shard[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_completes_names_of_strategies(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    status, script = run_here(monkeypatch, capsys, "completion", shell)
    assert status == 0
    assert "hybrid_parallel_in_process" in script
    assert "device-memory" in script
