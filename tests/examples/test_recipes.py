"""Every recipe is followed as its page says, comes to the page's figures, and to one device's."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L  # noqa: N812
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from examples.train_gpt import Text
from lightning_shard import ContextParallelStrategy, HybridParallelStrategy
from tests.docs.pages import ROOT, blocks
from tests.docs.test_walkthrough import follow, words
from tests.examples.commands import ignoring_advice, set_arguments
from tests.patience import patient
from tests.processes import free_port

pytestmark = [
    *ignoring_advice(".*`is_gradient_checkpointing` is deprecated"),  # peft 0.21, transformers 5
    pytest.mark.timeout(600),
]
PAGE = "docs/recipes.md"
FOLDER = ROOT / "examples" / "recipes"
OF_ZOO = {
    "lora": "peft",
    "qlora": "bitsandbytes",
    "diffusion": "diffusers",
    "forecast": "neuralforecast",
}
QUICK = ["long_context"]
TOLERANCE = 0.05  # another processor rounds otherwise, and trains a little otherwise
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def recipes() -> dict[str, tuple[str, str]]:
    """Return the first command of each section that is followed by what it prints, and that."""
    return {
        re.findall(r"examples[./]recipes[./](\w+)", command.source)[0]: (
            command.source,
            output.source,
        )
        for command, output in pairwise(blocks(PAGE))
        if command.language == "bash" and output.language == "text" and output.follows_directly
    }


def check_figures(printed: str, shown: str, tolerance: float = TOLERANCE) -> None:
    """Compare word for word, and number for number within the tolerance."""
    assert words(printed) == words(shown), printed
    found, expected = ([float(one) for one in _NUMBER.findall(text)] for text in (printed, shown))
    assert found == pytest.approx(expected, rel=tolerance, abs=0.01), printed


def run_here(monkeypatch: pytest.MonkeyPatch, command: str, folder: Path) -> None:
    """Run `python -m ...` inside this process, and let it write into a folder."""
    _, _, module, *arguments = command.split()
    monkeypatch.chdir(folder)
    set_arguments(monkeypatch, module, *arguments)
    runpy.run_module(module, run_name="__main__")


def test_every_recipe_has_a_section_and_120_lines_at_most() -> None:
    files = {path for path in FOLDER.iterdir() if path.suffix in (".py", ".sh")}
    assert {path.stem for path in files} - {"__init__"} == set(recipes())
    assert len(recipes()) == 9
    assert all(len(path.read_text().splitlines()) <= 120 for path in files)


def test_another_figure_is_noticed() -> None:
    check_figures("loss 2.21, 4 ranks", "loss 2.20, 4 ranks")
    with pytest.raises(AssertionError):
        check_figures("loss 2.51, 4 ranks", "loss 2.20, 4 ranks")


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_recipe_comes_to_the_figures_of_the_page(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command, shown = recipes()[name]
    run_here(monkeypatch, command, tmp_path)
    check_figures(capsys.readouterr().out, shown)


def in_a_checkout(command: str, folder: Path) -> str:
    """Run a command in a copy of what a checkout has."""
    for name in ("lightning_shard", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return follow(command, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_3d", "experts", "slurm"])
def test_a_recipe_comes_to_the_figures_of_the_page(name: str, tmp_path: Path) -> None:
    command, shown = recipes()[name]
    check_figures(in_a_checkout(command, tmp_path), shown)


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("name", OF_ZOO)
def test_a_recipe_of_another_package_comes_to_the_figures_of_the_page(
    name: str, tmp_path: Path
) -> None:
    command, shown = recipes()[name]
    check_figures(in_a_checkout(command, tmp_path), shown)


@pytest.mark.parametrize(
    ("name", "package"),
    [*OF_ZOO.items(), ("llama_3d", "transformers"), ("experts", "transformers")],
)
def test_a_package_that_is_missing_is_named_in_one_line(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [one for one in sys.modules if one.startswith("examples.recipes.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "examples.train_llama", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"needs \w+: pip install {package}$"):
        import_module(f"examples.recipes.{name}")


@pytest.mark.slow
def test_a_rank_is_killed_another_one_is_added_and_the_figures_are_the_pages() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        [str(FOLDER / "elastic.sh")],
        env=os.environ | {"PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(280),
        check=False,
    )
    assert run.returncode == 0, run.stdout
    sizes = re.findall(r"(\d) ranks:", run.stdout)
    assert sizes == ["4", "3", "4"], run.stdout
    assert re.search(r"^\$ kill -9 \d+$", run.stdout, re.MULTILINE), run.stdout
    assert re.search(r"^\$ LIGHTNING_SHARD_JOB=", run.stdout, re.MULTILINE), run.stdout
    assert len(run.stdout.splitlines()) < 25
    check_figures(run.stdout.splitlines()[-1], recipes()["elastic"][1])


SRUN = """#!/bin/bash
# Start the tasks of all hosts on this one, with the variables that srun sets.
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE)) \\
        SLURM_NODEID=$((rank / SLURM_NTASKS_PER_NODE)) "$@" &
done
status=0
for task in $(jobs -p); do wait "$task" || status=1; done
exit $status
"""


@pytest.mark.slow
def test_the_script_of_slurm_ends_with_weights_that_transformers_loads(tmp_path: Path) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    variables = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "llama",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "localhost,localhost",
        "MASTER_PORT": str(free_port()),
        "PATH": os.pathsep.join([str(srun.parent), str(Path(sys.executable).parent), os.defpath]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run = subprocess.run(
        [str(FOLDER / "slurm.sh"), "--accelerator", "cpu"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    check_figures(run.stdout, recipes()["slurm"][1])


def loader_of_one_device(dataset: Dataset[Any], batch_size: int, **_: bool) -> DataLoader:
    """Return the samples in the order in which a Trainer assigns them to the ranks."""
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=0)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


class AsOnRanks(Text):
    """Blocks of the text in the same order on one device as on ranks."""

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        if self.trainer.world_size > 1:
            return super().train_dataloader()
        return loader_of_one_device(self.train_blocks, self.batch_size)


OPTIONS: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true"}
Results = dict[str, torch.Tensor]  # weights, or losses where a network rounds to float32


def of_llama(strategy: Any, devices: int, samples: int) -> Results:
    recipe = import_module("examples.recipes.llama_3d")
    data = AsOnRanks(context=16, batch_size=samples)
    trainer = recipe.train(strategy, data, 3, devices=devices, **OPTIONS)
    return {"loss": trainer.callback_metrics["val_loss"]}


def of_long_texts(strategy: Any, devices: int, samples: int) -> Results:
    recipe = import_module("examples.recipes.long_context")
    trainer = recipe.train(strategy, 64, 3, devices=devices, **OPTIONS)
    return trainer.lightning_module.state_dict()


def of_experts(strategy: Any, devices: int, samples: int) -> Results:
    recipe = import_module("examples.recipes.experts")
    L.seed_everything(0, verbose=False)
    data, model = AsOnRanks(context=16, batch_size=samples), recipe.Mixture(balance=0.0)
    trainer = recipe.train(strategy, data, 3, model, devices=devices, accelerator="cpu")
    return {"loss": trainer.callback_metrics["val_loss"]}


def of_pictures(strategy: Any, devices: int, samples: int) -> Results:
    recipe = import_module("examples.recipes.diffusion")
    loader = loader_of_one_device if devices == 1 else DataLoader
    with patch.object(recipe, "DataLoader", loader):
        _, model = recipe.train(samples, 3, strategy=strategy, devices=devices, **OPTIONS)
    averages = enumerate(model.average.shadow_params)
    return model.state_dict() | {f"average {number}": one for number, one in averages}


def of_adapters(strategy: Any, devices: int, samples: int) -> Results:
    recipe = import_module("examples.recipes.lora")
    L.seed_everything(0, verbose=False)
    model = recipe.LoRALlama(num_layers=2)
    data = AsOnRanks(context=16, batch_size=samples)
    recipe.fit(model, data, 3, strategy=strategy, devices=devices, **OPTIONS)
    return model.state_dict()


def sizes(**options: int) -> Callable[[], HybridParallelStrategy]:
    return lambda: HybridParallelStrategy(backend="in_process", **options)


@pytest.mark.parametrize(
    ("train", "strategy", "devices", "data_ranks"),
    [
        pytest.param(
            of_long_texts, lambda: ContextParallelStrategy(backend="in_process"), 2, 1, id="long"
        ),
        pytest.param(
            of_llama,
            sizes(pipeline_parallel_size=2, tensor_parallel_size=2),
            8,
            2,
            id="llama_3d",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            of_experts,
            sizes(expert_parallel_size=2),
            2,
            2,
            id="experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            of_pictures,
            lambda: "zero2_in_process",
            2,
            2,
            id="diffusion",
            marks=[pytest.mark.slow, pytest.mark.zoo],
        ),
        pytest.param(
            of_adapters,
            lambda: "zero3_in_process",
            2,
            2,
            id="lora",
            marks=[pytest.mark.slow, pytest.mark.zoo],
        ),
    ],
)
def test_a_recipe_trains_the_weights_of_one_device(
    train: Callable[[Any, int, int], Results],
    strategy: Callable[[], Any],
    devices: int,
    data_ranks: int,
) -> None:
    one, ranks = train("auto", 1, 8), train(strategy(), devices, 8 // data_ranks)
    assert one.keys() == ranks.keys()
    for name, expected in one.items():
        torch.testing.assert_close(
            ranks[name],
            expected,
            rtol=1e-5,
            atol=1e-9,
            msg=lambda text, name=name: f"{name}: {text}",
        )
