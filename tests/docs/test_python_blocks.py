"""Every block of Python in the README and docs/ runs, in order, with each page's own names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_shard.errors
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.testing import run_ranks
from tests.docs.pages import NAMES, Block, blocks
from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.trainers import SILENT

PRELUDE = blocks("docs/start.md", "python")[0]
WITH_RAY = "docs/ray.md"  # its blocks run in tests/ray, where there is a cluster
WITH_PYTHON = [name for name in NAMES if blocks(name, "python") and name != WITH_RAY]
QUIET = {**SILENT, "accelerator": "cpu"}
_RAISES = re.compile(r"# raises (\w+)$", flags=re.MULTILINE)
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        *UPSTREAM_WARNINGS,
        r".*`DistributedSampler`",  # Lightning's advice about evaluation on several ranks
        r"The number of training batches",
        r"`torch.load`",
        r"offload=.optimizer. saves nothing on CPU ranks",
        r"activation_offload=True saves nothing on CPU ranks",
        r".fit\(ckpt_path=\"last\"\) is set, but there is no last checkpoint",
    )
]


@pytest.fixture(autouse=True)
def trainers_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `L.Trainer` train in this process, whatever the page's own devices are."""
    trainer = L.Trainer

    def here(*, strategy: Any, **options: Any) -> L.Trainer:
        if isinstance(strategy, DataParallelStrategy):
            args, given = strategy.given_options
            strategy = type(strategy)(*args, **{**given, "backend": "in_process"})
        elif not strategy.endswith("_in_process"):
            strategy += "_in_process"
        saves = any(isinstance(one, ModelCheckpoint) for one in options.get("callbacks", ()))
        return trainer(strategy=strategy, **{**options, **QUIET, "enable_checkpointing": saves})

    monkeypatch.setattr(L, "Trainer", here)


def run(block: Block, name: str, names: dict[str, Any]) -> None:
    """Execute a block, which may say in a comment what it raises."""
    code = compile("\n" * (block.line - 1) + block.source, name, "exec")
    expected = _RAISES.search(block.source)
    if expected is None:
        exec(code, names)
        return
    with pytest.raises(getattr(lightning_shard.errors, expected[1])):
        exec(code, names)


def run_as_test(test: Callable[..., None]) -> None:
    """Call a test of a page, on as many ranks as it is marked with."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "ranks"]
    if marks:
        run_ranks(test, *marks[0].args)
    else:
        test()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", WITH_PYTHON)
def test_the_blocks_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # for what a page's runs write
    L.seed_everything(0, verbose=False)
    names: dict[str, Any] = {"__name__": "page"}
    if name not in ("README.md", "docs/start.md"):
        run(PRELUDE, "docs/start.md", names)
    capsys.readouterr()
    printed = ""
    for block in blocks(name):
        if block.language == "python":
            run(block, name, names)
            printed = capsys.readouterr().out
        elif block.language == "text" and block.follows_directly:
            assert stripped(printed) == stripped(block.source), f"{name}, line {block.line}"
    for key, value in list(names.items()):
        if key.startswith("test_"):
            run_as_test(value)


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]
