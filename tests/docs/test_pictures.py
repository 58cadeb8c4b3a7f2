"""The pictures of strategies are what their script draws, and show what ranks hold in a dry run."""

import re
import runpy
from collections.abc import Callable
from functools import partial
from typing import Any
from xml.etree import ElementTree

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn

import lightning_shard as shard
from tests.docs.pages import ROOT, text_of
from tests.expert_parallel.models import mixtral
from tests.planning.test_dry_run import text

FOLDER = ROOT / "docs" / "images"
SCRIPT = runpy.run_path(str(FOLDER / "holdings.py"))
DRAWN = dict(SCRIPT["pictures"]())
KINDS = {"parameters": 1, "gradients": 1, "optimizer state": 2}  # values for each parameter
WIDTH = 12  # four and three ranks, and two halves of two, divide every matrix


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class FourLayers(L.LightningModule):
    """All of its parameters are in four equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
STAGES = partial(shard.HybridParallelStrategy, pipeline_parallel_size=2, num_microbatches=2)
STRATEGIES: dict[str, Callable[[], Any]] = {
    "shard_ddp": shard.DDPStrategy,
    "zero1": shard.ZeRO1Strategy,
    "zero2": shard.ZeRO2Strategy,
    "zero3": shard.ZeRO3Strategy,
    "tensor_parallel": partial(shard.TensorParallelStrategy, plan=PLAN),
    "context_parallel": shard.ContextParallelStrategy,
    "pipeline_parallel": partial(shard.PipelineParallelStrategy, num_microbatches=4),
    "hybrid_parallel": partial(STAGES, tensor_parallel_size=2, plan=PLAN),
    "hybrid sharding": partial(
        shard.HybridParallelStrategy, data_parallel_size=(2, 2), zero_stage=3
    ),
    "stage 0": partial(STAGES, tensor_parallel_size=2, plan=PLAN),
    "local_sgd": shard.LocalSGDStrategy,
    "async_sgd": shard.AsyncSGDStrategy,
    "four ranks": shard.ElasticStrategy,
    "rank 2 is lost": shard.ElasticStrategy,
}
"""By the name of a panel."""
RANKS = {"stage 0": 8, "rank 2 is lost": 3}
PANELS = {panel.name: panel for panels, _ in SCRIPT["PICTURES"].values() for panel in panels}
PANELS |= {panel.name: panel for panel in SCRIPT["PANELS"].values()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_rank_holds_in_a_dry_run_what_is_drawn(name: str) -> None:
    batch = [torch.empty(12, 8, WIDTH, device="meta")]
    dry = STRATEGIES[name]().dry_run(FourLayers(), batch, world_size=RANKS.get(name, 4))
    for figures in dry.ranks:
        memory = figures.memory
        held = (memory.parameters, memory.gradients, memory.optimizer_state)
        for (kind, values), num_bytes in zip(KINDS.items(), held, strict=True):
            full = 4 * values * dry.num_parameters
            assert num_bytes == full * PANELS[name].share(kind), kind


def test_no_panel_is_left_out() -> None:
    assert PANELS.keys() - STRATEGIES.keys() == {"stage 1", "expert_parallel_size=4"}
    assert PANELS["stage 1"].share("parameters") == PANELS["stage 0"].share("parameters")


def test_experts_are_held_as_they_are_drawn() -> None:
    model = mixtral()
    strategy = shard.HybridParallelStrategy(expert_parallel_size=4)
    dry = strategy.dry_run(model, [text(4)[0]], world_size=4)
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    of_experts = sum(size for name, size in sizes.items() if "experts" in name)
    others = sum(sizes.values()) - of_experts
    (memory,) = (one.memory for one in dry.ranks)
    held = (memory.parameters, memory.gradients, memory.optimizer_state)
    for (kind, values), num_bytes in zip(KINDS.items(), held, strict=True):
        cells = PANELS["expert_parallel_size=4"].ranks[1][kind]
        num_others = sum(part < 4 for _, part in cells)  # of 4 layers x 4 parts
        num_experts = len(cells) - num_others  # of 4 layers x 8 parts
        drawn = others * num_others / 16 + of_experts * num_experts / 32
        assert num_bytes == pytest.approx(4 * values * drawn, rel=0.01), kind  # padding


def test_the_script_draws_the_pictures_that_are_checked_in() -> None:
    there = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
    assert there == DRAWN  # otherwise: python docs/images/holdings.py


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_an_svg_without_anything_from_elsewhere(name: str) -> None:
    root = ElementTree.fromstring(DRAWN[name])
    assert root.tag.endswith("svg")
    assert "href" not in DRAWN[name]
    assert "url(http" not in DRAWN[name]


@pytest.mark.parametrize("name", SCRIPT["PICTURES"])
def test_the_page_of_a_strategy_begins_with_its_picture(name: str) -> None:
    _, picture, sentences, *_ = text_of(f"docs/{name}.md").split("\n\n")
    assert re.findall(r'(?:srcset|src)="images/(.*?)"', picture) == [
        f"{name}-dark.svg",
        f"{name}-light.svg",
    ]
    assert re.search(r'alt="[^"]{40,}"', picture)
    assert sentences.count(". ") + sentences.count(".\n") + sentences.endswith(".") >= 2
