"""What a plan compares trains: each strategy is asked what the module and its optimizers allow."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.planning.candidates import Candidate, SearchSpace
from lightning_shard.planning.search import _asking, plan
from lightning_shard.trainer.dry_run import attached
from tests.strategies.parity import UPSTREAM_WARNINGS, quiet_trainer

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]
SPACE = SearchSpace(
    num_ranks=4,
    ranks_per_node=4,
    num_blocks=4,
    global_batch=16,
    tp_sizes=(1, 2),
    checkpointing=(None,),
)
EVERY = {
    *("shard_ddp", "zero1", "zero2", "zero3", "offload"),
    *("tensor_parallel", "pipeline_parallel", "hybrid_parallel"),
}


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.embed(batch[0])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


class Muon(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon(self.parameters(), lr=0.1)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        total: Any = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, int(total))]


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


class Sparse(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.1)


class CountedRows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 8, scale_grad_by_freq=True)


class CompiledWhole(Net):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


class Gan(L.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.made, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc, union-attr]
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(-self.judge(self.made(batch[0])).mean())
        first.step()
        self.untoggle_optimizer(first)
        second.zero_grad()
        loss = self.judge(self.made(batch[0]).detach()).square().mean()
        self.manual_backward(loss)
        second.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.made, self.judge)]


def names(made: Candidate) -> set[str]:
    return {made.strategy, *(["offload"] if made.offload else [])}


KEPT: dict[type[L.LightningModule], set[str]] = {
    Net: EVERY,
    Scheduled: EVERY,
    Frozen: EVERY,
    Lbfgs: {"shard_ddp"},
    Muon: EVERY - {"offload"},
    Sparse: set(),
    CompiledWhole: EVERY - {"pipeline_parallel"},
    Gan: EVERY - {"pipeline_parallel", "hybrid_parallel"},
    CountedRows: {"tensor_parallel"},
}


@pytest.mark.parametrize("kind", KEPT)
def test_candidates_are_those_that_the_strategies_own_checks_take(
    kind: type[L.LightningModule],
) -> None:
    """LBFGS was planned under zero1, which refuses it; none was asked."""
    anatomy: Any = SimpleNamespace(module=kind(), plan_of=lambda tp: {"blocks.0": "colwise"})
    with _asking(anatomy) as why_not:
        reasons = {one: why_not(one) for one in SPACE.candidates()}
    kept = set().union(*(names(one) for one, reason in reasons.items() if not reason))
    if kind in (CompiledWhole, CountedRows):  # by number of ranks
        assert ("pipeline_parallel" in kept) == ("pipeline_parallel" in KEPT[kind])
    else:
        assert kept == KEPT[kind]
    assert all(len(reason) > 40 for reason in reasons.values() if reason)


def test_a_module_that_steps_by_hand_is_planned_for_and_trains_as_on_one_device(
    tmp_path: Path,
) -> None:
    """A plan's dry runs ended in an error, since the module was attached to no trainer."""
    data = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    found = []
    for strategy, devices in (("auto", 1), ("shard_auto_in_process", 2)):
        torch.manual_seed(1)
        module = Gan()
        by_hand: Any = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
        options: Any = {"strategy": strategy, "devices": devices, **by_hand}
        trainer = quiet_trainer(max_steps=4, default_root_dir=tmp_path, **options)
        trainer.fit(module, DataLoader(data, batch_size=8 // devices))
        found.append(module.state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


class SparseRows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8, sparse=True)  # type: ignore[assignment]


def test_gradients_of_some_rows_are_planned_for() -> None:
    """Torch's error of a sparse tensor's storage ended the plan."""
    found = plan(
        SparseRows(), [torch.zeros(8, dtype=torch.int64)], devices=2, device_memory=1 << 30
    )
    assert found.recommendation is not None


class Unready(Net):
    def configure_optimizers(self) -> Any:
        raise ValueError("the data's size is not known")


def test_a_plan_tells_why_optimizers_could_not_be_made() -> None:
    """What configure_optimizers raises was swallowed, and a module's Fabric became its trainer."""
    anatomy: Any = SimpleNamespace(module=Unready(), plan_of=lambda tp: {"blocks.0": "colwise"})
    with _asking(anatomy) as why_not:
        reasons = {why_not(one) for one in SPACE.candidates()} - {""}
    assert reasons == {
        "configure_optimizers makes none for parameters without values: ValueError: the data's "
        "size is not known"
    }
    module = Net()
    module._fabric = fabric = L.Fabric(accelerator="cpu", devices=1)
    with attached(module):
        assert module._trainer is not None
    assert (module._trainer, module._fabric) == (None, fabric)
