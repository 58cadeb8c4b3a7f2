"""What users can mend is one line on standard error, before any work; code 2 if a parser says it.

command  x  what is wrong with a path, a number or a name  ->  exit code, words of the last line
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lightning_shard.cli import main
from lightning_shard.planning import search
from lightning_shard.planning.machine import machine_profile
from tests.core.reporting.runs import whole_run, write
from tests.examples.commands import QUIET, REPOSITORY, ignoring_advice, set_arguments

pytestmark = ignoring_advice()

DIGITS = f"--config={REPOSITORY / 'configs' / 'digits_zero2.yaml'}"
FIT = (
    "fit",
    DIGITS,
    "--seed_everything=0",
    "--trainer.logger=false",
    "--trainer.max_epochs=1",
    "--trainer.strategy=zero2_in_process",
    *QUIET,
)
PLAN = ("plan", DIGITS, "--devices=2")
READ = {
    "missing": "No such file or directory",
    "folder": "Is a directory",
    "text": "is no YAML: while parsing a flow sequence",
    "binary": "is no YAML: 'utf-8' codec can't decode byte",
    "empty": "holds NoneType, expected a mapping",
    "list": "holds list, expected a mapping",
}
"""By what is wrong with a YAML file what is said."""
WRITTEN = {"folder": "is a folder, expected the path of a file", "/proc/x": "cannot be written: "}
OTHER = {"rank": 0, "step": 1, "loss": 1.0}
OURS = "lightning_shard"
MONITOR = "lightning_shard.profiling.StepMonitor"
OPTION = "--trainer.strategy.bucket_mb"
LACKS = "is not installed: pip install 'lightning-shard"
ROWS = [
    *(((*FIT[:1], f"--config={bad}"), 2, said) for bad, said in READ.items()),
    *((("prove", f"--config={bad}"), 2, said) for bad, said in READ.items()),
    *((("plan", f"--config={bad}", "--devices=2"), 2, said) for bad, said in READ.items()),
    *(((*PLAN, f"--tensor-plan={bad}"), 2, said) for bad, said in READ.items()),
    *(((*PLAN, f"--yaml={bad}"), 2, said) for bad, said in WRITTEN.items()),
    *((("doctor", f"--measure={bad}"), 2, said) for bad, said in WRITTEN.items()),
    *((("report", "run", f"--output={bad}"), 2, said) for bad, said in WRITTEN.items()),
    ((*PLAN, "--picture=folder.png"), 2, "is a folder"),
    ((*PLAN, "--picture=/proc/x.png"), 2, "cannot be written: "),
    ((*PLAN, "--picture=x.unknown"), 2, "none of the endings .png, .svg, .pdf, .jpg"),
    *(
        ((*PLAN, f"--machine={bad}"), 1, "machine profile")
        for bad in (*READ, "h1000", "broken.json", "other.json")
    ),
    *((("report", bad), 1, "has no monitor/rank_*.jsonl") for bad in READ),
    *((("replay", bad, DIGITS), 2, "holds no recorded step") for bad in READ),
    *(
        (command, 1, said)
        for bad, said in {
            "missing": "There is no checkpoint 'missing'",
            "folder": "is a folder without .metadata",
            "text": "is no checkpoint, or its beginning is damaged",
            "binary": "is no checkpoint, or its beginning is damaged",
            "empty": "is empty, expected a checkpoint",
            "corrupt.ckpt": "is damaged",
        }.items()
        for command in (
            (*FIT, f"--ckpt_path={bad}"),
            ("describe", bad),
            ("consolidate", bad, "whole.ckpt"),
        )
    ),
    ((*FIT, "--ckpt_path=weights.ckpt"), 1, "has no 'pytorch-lightning_version', expected a"),
    (("consolidate", "weights.ckpt", "/proc/x.ckpt"), 1, "was not saved: "),
    (("consolidate", "weights.ckpt", "x.unknown"), 1, "ends in '.unknown'"),
    (("consolidate", "weights.ckpt", "x.pt", "--prefix=b"), 1, "names begin with 'b'"),
    (("consolidate", "weights.ckpt", "x.pt", "--max-shard-size=0GB"), 2, "'0GB' is no size"),
    *(
        ((*command, f"{option}={bad}"), 2, f"{option}: got '{bad}', expected a whole number of at")
        for command, option in (
            (PLAN[:2], "--devices"),
            (PLAN, "--nodes"),
            (PLAN, "--global-batch"),
            (("doctor",), "--ranks"),
            (("describe", "weights.ckpt"), "--depth"),
        )
        for bad in ("0", "-1", "x", "1.5", "nan", "")
    ),
    *(
        ((*command, f"{option}={bad}"), code, f"got {bad} ranks on one host, expected at most 1024")
        for bad in (10**5, 10**12)
        for command, option, code in (
            (("prove", DIGITS), "--ranks", 2),
            (("doctor",), "--ranks", 1),
            (FIT, "--trainer.devices", 1),
        )
    ),
    ((*PLAN, "--nodes=3"), 1, "got 2 devices on 3 nodes"),
    ((*PLAN[:2], "--devices=99999999999"), 1, "expected 1 to 1,000,000 devices"),
    ((*PLAN, "--machine=numbers.json"), 1, "flops_16 must be a finite number above 0, got nan"),
    ((*PLAN, "--tensor-plan=layers.yaml"), 1, "The plan's entry 'nowhere' matches no module"),
    ((*PLAN, "--yaml=text/x.yaml"), 2, "cannot be written: Not a directory"),
    ((*PLAN, "--device-memory=x"), 2, "'x' is no size, expected 5GB or 500MiB"),
    ((*PLAN, "--precision=fp7"), 2, "--precision: invalid choice: 'fp7'"),
    (("doctor", "--backend=smoke"), 2, "--backend: invalid choice: 'smoke'"),
    (("doctor", "--network=0GB"), 2, "'0GB' is no size"),
    (("completion", "tcsh"), 2, "shell: invalid choice: 'tcsh'"),
    (("plan",), 2, "the following arguments are required: --config, --devices"),
    (("fti",), 2, "invalid choice: 'fti'"),
    *(
        (("prove", DIGITS, f"{option}={bad}"), 2, "expected 1 or more")
        for option in ("--ranks", "--steps", "--shrink", "--narrow")
        for bad in (0, -1)
    ),
    (("prove", DIGITS, "--steps=x"), 2, 'key "steps": Expected a int. Got value: x'),
    (("prove", DIGITS, "--precision=fp7"), 2, "Precision 'fp7' is invalid"),
    ((*FIT, "--trainer.precision=fp7"), 2, 'key "trainer.precision": Expected a int; Expected a L'),
    ((*FIT, "--trainer.max_epochs=x"), 2, 'key "trainer.max_epochs": Expected a int; Given value:'),
    ((*FIT, "--trainer.devices=0"), 1, "is not a valid input using cpu accelerator"),
    ((*FIT, "--trainer.devices=x"), 1, "should be an int > 0"),
    ((*FIT, "--trainer.num_nodes=0"), 1, "`num_nodes` must be a positive integer, but got 0"),
    ((*FIT, "--trainer.accelerator=abacus"), 1, "invalid accelerator name"),
    ((*FIT, "--trainer.strategy=quickly"), 1, "invalid strategy name: `strategy='quickly'`"),
    (
        (*FIT, "--trainer.strategy=zero9"),
        1,
        "got strategy='zero9', which is no strategy's name; the nearest",
    ),
    ((*FIT, f"--trainer.strategy={OURS}.ZeRO9Strategy"), 1, f"names of {OURS}: ZeRO3Str"),
    ((*FIT, f"--trainer.strategy={OURS}.ZeRO3Strategy", f"{OPTION}=nan"), 2, "Expected a float"),
    ((*FIT, f"--trainer.strategy={OURS}.ZeRO3Strategy", f"{OPTION}=-1"), 1, "got -1.0 of type"),
    (
        (*FIT, f"--trainer.callbacks={MONITOR}", "--trainer.callbacks.dirpath=x"),
        2,
        "the options of",
    ),
    ((*FIT, "--trainer.accumulate_grad_batches=0"), 1, "expected 1 or more"),
    ((*FIT, "--trainer.max_steps=-5"), 1, "`max_steps` must be a non-negative integer"),
    ((*FIT, "--trainer.max_steps=nan"), 2, 'key "trainer.max_steps": Expected a int'),
    ((*FIT, "--trainer.limit_train_batches=2.5"), 1, "invalid value 2.5 for limit_train_batches"),
    ((*FIT, "--trainer.accelerator=gpu"), 1, "No supported gpu backend found"),
    ((*FIT, "--seed_everything=-1"), 1, "-1 is not in bounds"),
    ((*FIT, "--ckpt_path=text/x.ckpt"), 1, "There is no checkpoint 'text/x.ckpt'"),
    ((*FIT, "--ckpt_path=nowhere://x"), 1, "Protocol not known: nowhere"),
    ((*FIT, "surplus"), 2, "unrecognized arguments: surplus"),
    *(((one,), 2, "there is no model: give --model") for one in ("fit", "prove")),
    (("plan", "--config={}", "--devices=2"), 2, "there is no model: give --model"),
    *(
        ((*command, "--config=number.yaml"), 2, "has trainer: 3, expected a mapping")
        for command in (("fit",), ("prove",), ("plan", "--devices=2"))
    ),
    *(
        ((*command, "--model=raises.Net"), 2, "raises.py, line 2: I am broken")
        for command in (FIT, ("prove",))
    ),
    ((*FIT, "--model=imports.Net"), 2, "imports.py, line 1: No module named 'nowhere'"),
    ((*FIT, "--model=syntax.Net"), 2, "invalid syntax (syntax.py, line 1)"),
    ((*FIT, "--model=bad_models.Nothing"), 2, "not correspond to a subclass of LightningModule"),
    ((*FIT, "--data=bad_models.NoLoader"), 2, "not correspond to a subclass of LightningDataModu"),
    ((*FIT, "--model=bad_models.Needs"), 2, "the following arguments are required: width"),
    (("prove", DIGITS, "--trainer.strategy=ddp"), 2, "prove got the strategy 'ddp'"),
    (("prove", DIGITS, "--shrink=99"), 2, "shrink=99 found no ModuleList"),
    *(
        (
            ("replay", f"{bad}_step", DIGITS),
            2,
            "rank-00000.pt cannot be read: it is no whole archive",
        )
        for bad in ("text", "binary", "empty")
    ),
    (("report", "run", "missing"), 1, "missing has no monitor/rank_*.jsonl"),
    (("report", "run", "empty_run"), 1, "have no record that can be read"),
    (
        ("report", "other_run"),
        1,
        "A record of other_run is not as callbacks write it (KeyError: '",
    ),
    (("consolidate", "weights.ckpt", "full"), 1, "a folder of this name holds other files"),
    (("describe", "weights.ckpt", "more"), 2, "unrecognized arguments: more"),
    (("doctor", "--network=-3GB"), 2, "'-3GB' is no size"),
    (("",), 2, "invalid choice: ''"),
    (("--version", "x"), 2, "invalid choice: 'x'"),
    (("--version", "fit"), 2, "unrecognized arguments: --version"),
    (("--help", "x"), 2, "invalid choice: 'x'"),
    (("--debug",), 2, "the following arguments are required: SUBCOMMAND"),
    (("report",), 2, "the following arguments are required: RUN_DIR (see"),
    *(
        ((*command, "more"), 2, "unrecognized arguments: more")
        for command in (("doctor",), ("strategies",), ("completion", "bash"), ("prove", DIGITS))
    ),
    ((*FIT, "--model=nowhere.Net"), 2, "class_path 'nowhere.Net': No module named 'nowhere'"),
    ((*FIT, "--model=lacks_sklearn.Net"), 2, f"sklearn {LACKS}[examples]'"),
    ((*FIT[:1], "--model=bad_models.LacksPeft", *FIT[2:]), 1, f"peft {LACKS}[hf]'"),
    ((*FIT[:1], "--config=key.yaml"), 2, "'trainer.max_epoks' is unknown; the nearest options"),
    ((*FIT[:1], "--model=bad_models.NoLoader", *FIT[2:]), 1, "`train_dataloader` must be impl"),
    (("test", "--model=bad_models.NoLoader", *FIT[2:]), 1, "No `test_step()` method defined"),
    *(
        (("fit", f"--model=bad_models.{name}", *FIT[2:]), 1, "The training loader had no batch")
        for name in ("Empty", "EmptyStream")
    ),
    (("plan", "--config=empty_data.yaml", "--devices=2"), 1, "has no batch, expected one at least"),
]
MODELS = """
import lightning as L, torch
from torch.utils.data import DataLoader
class NoLoader(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def training_step(self, batch, index): return self.layer(batch[:, :1]).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
class Needs(NoLoader):
    def __init__(self, width: int): raise ValueError("width must be even")
class LacksPeft(NoLoader):
    def __init__(self): raise ModuleNotFoundError("No module named 'peft'")
class Raises(NoLoader):
    def train_dataloader(self): return DataLoader(torch.zeros(4, 2))
class Empty(NoLoader):
    def train_dataloader(self): return DataLoader(torch.zeros(0, 2))
class Nothing(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(())
class EmptyStream(NoLoader):
    def train_dataloader(self): return DataLoader(Nothing())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make the files that the rows name, and find classes there."""
    folder = tmp_path_factory.mktemp("bad_input")
    for name in ("folder", "folder.png"):
        (folder / name).mkdir()
    texts = {
        "text": "epoch 1: [hello\n",
        "empty": "",
        "list": "- 1\n",
        "broken.json": "{",
        "other.json": '{"a": 1}',
        "bad_models.py": MODELS,
        "lacks_sklearn.py": "raise ModuleNotFoundError(\"No module named 'sklearn'\")",
        "empty_data.yaml": "seed_everything: 0\nmodel: bad_models.Empty\n",
        "key.yaml": "trainer: {max_epoks: 3}\nmodel: bad_models.NoLoader\n",
        "number.yaml": "trainer: 3\nmodel: bad_models.NoLoader\n",
        "layers.yaml": "nowhere: colwise\n",
        "numbers.json": json.dumps({**asdict(machine_profile("cpu")), "flops_16": math.nan}),
        "raises.py": "x = 1\nraise RuntimeError('I am broken')\n",
        "imports.py": "import nowhere\n",
        "syntax.py": "def f(:\n",
        "full/other": "of somebody",
        "empty_run/monitor/rank_00000.jsonl": "",
        "other_run/monitor/rank_00000.jsonl": json.dumps({"time": 1.0, "kind": "step"} | OTHER),
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "binary").write_bytes(bytes(range(256)))
    for name in ("text", "binary", "empty"):
        (folder / f"{name}_step").mkdir()
        shutil.copy(folder / name, folder / f"{name}_step" / "rank-00000.pt")
    torch.save({"state_dict": {"a": torch.ones(3)}}, folder / "weights.ckpt")
    whole = (folder / "weights.ckpt").read_bytes()
    (folder / "corrupt.ckpt").write_bytes(whole[: len(whole) // 2])
    write(folder / "run", whole_run())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.syspath_prepend(str(REPOSITORY))
        yield folder


@pytest.fixture(autouse=True)
def _work_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command, and return its exit code."""
    set_arguments(monkeypatch, "lightning-shard", *arguments)
    try:
        return main()
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.few_cases(60)
@pytest.mark.filterwarnings("ignore:Total length of .* is zero")  # Lightning, of no data
@pytest.mark.parametrize(("arguments", "code", "said"), ROWS)
def test_bad_input_is_one_line_before_any_work(
    arguments: tuple[str, ...],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Many of these ended in a traceback, some after the work, others below 45 lines of usage."""
    monkeypatch.setattr(search, "_searched", None)  # which would be the work
    monkeypatch.setattr("lightning_shard.cli.machine._rooms", None)
    assert ended(monkeypatch, *arguments) == code
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("lightning-shard")
    assert said in line
    assert not output.out


@pytest.mark.parametrize(("path", "option"), [("run", "--output=page.html")])
def test_a_file_without_permission_is_refused_before_any_work(
    path: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("page.html").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert ended(monkeypatch, "report", path, option) == 2
    assert "'page.html' cannot be written: it is read-only" in capsys.readouterr().err


def test_a_configuration_that_may_not_be_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    assert ended(monkeypatch, *PLAN) == 2
    assert "cannot be read: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((*FIT, "--trainer.devices=0"), "MisconfigurationException"),
        ((*FIT, "--ckpt_path=text"), "CheckpointError"),
        ((*FIT, "--trainer.precision=fp7"), "ValueError"),
        (("report", "text"), "ConfigError"),
    ],
)
def test_debug_shows_the_traceback_of_each_refusal(
    arguments: tuple[str, ...],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(monkeypatch, *arguments, "--debug") in (1, 2)
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert kind in error


def test_an_error_in_user_code_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        ended(monkeypatch, "fit", "--model=bad_models.Raises", *FIT[2:])
    assert any(entry.path.name == "bad_models.py" for entry in raised.traceback)


def test_what_the_constructor_of_a_model_raises_passes_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It came as an error about types in one line, `Does not validate against any of the Union`."""
    with pytest.raises(ValueError, match=r"^width must be even$") as raised:
        ended(monkeypatch, "fit", "--model=bad_models.Needs", "--model.width=3", *FIT[2:])
    assert any(entry.path.name == "bad_models.py" for entry in raised.traceback)


@pytest.mark.parametrize("debug", [False, True])
def test_a_model_that_cannot_be_made_is_no_finding_of_prove(
    debug: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its constructor raised ended with code 1, which says that ranks train otherwise."""
    options = ("--seed_everything=0", "--model=bad_models.Needs", "--model.width=3")
    assert ended(monkeypatch, "prove", *options, *["--debug"] * debug) == 2
    *before, last = capsys.readouterr().err.splitlines()
    assert "ValueError: width must be even" in last
    assert any("bad_models.py" in line for line in before) == debug
    assert debug or last == "lightning-shard: ValueError: width must be even (--debug shows where)"


def test_missing_folders_of_what_is_written_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`plan --yaml` into a folder that was not there failed after the search."""
    path = tmp_path / "new" / "strategy.yaml"
    assert ended(monkeypatch, *PLAN, f"--yaml={path}", "--json") == 0
    assert json.loads(capsys.readouterr().out)["recommendation"]
    assert "class_path" in path.read_text(encoding="utf-8")
