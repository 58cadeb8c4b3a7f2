"""The page's blocks and the example run on a cluster, as a user runs them."""

import argparse
import re
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest

from tests.docs.pages import blocks
from tests.processes import run_alone
from tests.trainers import cpu_trainer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.mark.usefixtures("cluster")
def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(blocks("docs/start.md", "python")[0].source, names)
    for block in blocks("docs/ray.md", "python"):
        exec(block.source.replace("/mnt/shared/runs", str(tmp_path)), names)
    result = names["result"]
    assert (result.metrics["epoch"], result.metrics["step"]) == (1, 16)
    assert Path(result.checkpoint.path, "checkpoint.ckpt").is_dir()
    kept = list((tmp_path / "first").glob("checkpoint_step=*"))
    assert len(kept) == 2  # of num_to_keep


@pytest.mark.usefixtures("cluster")
def test_the_example_trains_as_in_process(tmp_path: Path) -> None:
    from examples import ray_gpt
    from examples.train_gpt import GPT, Text

    options = argparse.Namespace(
        strategy="zero3", workers=2, gpus=False, steps=4, report_every=2, restarts=0
    )
    result = ray_gpt.run(argparse.Namespace(**vars(options), name="gpt", storage=tmp_path))
    L.seed_everything(0, verbose=False)
    trainer = cpu_trainer(
        strategy="zero3_in_process", devices=2, max_steps=4, gradient_clip_val=1.0
    )
    trainer.fit(GPT(), datamodule=Text())
    assert result.metrics["step"] == 4
    expected = float(trainer.callback_metrics["train_loss"])
    assert result.metrics["train_loss"] == pytest.approx(expected, rel=1e-5)
    assert Path(result.checkpoint.path, "checkpoint.ckpt").is_dir()


def test_the_example_is_a_command(cluster: Any, tmp_path: Path) -> None:
    """Three steps are less than an epoch: there is no validation loss to tell."""
    options = {"address": cluster.address, "storage": tmp_path, "steps": 3, "report-every": 2}
    words = [f"--{name}={value}" for name, value in options.items()]
    program = ("-m", "examples.ray_gpt", "--strategy", "tensor_parallel")
    done = run_alone(*program, *words, timeout_seconds=600)
    assert done.returncode == 0, done.output
    folder = re.escape(str(tmp_path / "ray_gpt"))
    told = rf"^step 3: train_loss \d\.\d+ nats per byte; {folder}/checkpoint_step=3-\w+$"
    assert re.search(told, done.output, flags=re.MULTILINE), done.output
