"""What users log under tensor parallel counts each data-parallel rank once."""

import copy
import pickle
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from lightning_shard import TensorParallelStrategy
from lightning_shard.strategies.trainer.step_collectives import MetricGroups
from lightning_shard.testing import run_ranks
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring(
    r"Using `DistributedSampler` with the dataloaders",
    # Lightning 2.6's all_gather, with torch 2.13
    r"torch.distributed.nn.functional.all_gather is deprecated",
)

REDUCTIONS = ("mean", "sum", "max", "min")


class Logged(L.LightningModule):
    """Logs by every reduction, and by torchmetrics objects."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 8), nn.Linear(8, 2)
        self.total = SumMetric()
        self.confusion = MulticlassConfusionMatrix(3)
        self.several = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
        self.kept = CatMetric()
        self.found: dict[str, Any] = {}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, label = batch
        out = self.down(torch.relu(self.up(x)))
        for name in REDUCTIONS:
            self.log(f"by_{name}", x.sum(), reduce_fx=name, sync_dist=True)
        self.total(x.sum())
        self.log("total", self.total)
        self.several(x.sum())
        self.log_dict(dict(self.several))
        self.confusion.update(torch.zeros_like(label), label)
        self.kept.update(label)
        assert torch.isfinite(out).all()

    def on_validation_epoch_end(self) -> None:
        self.found["confusion"] = self.confusion.compute()
        self.found["kept"] = self.kept.compute().sort().values
        own = self.several.clone()
        self.found["clone"] = own.compute()["sum"]
        self.found["gathered"] = len(self.all_gather(torch.zeros(1)).flatten())


def validate(num_ranks: int = 1, size: int = 1) -> tuple[dict[str, float], Logged]:
    torch.manual_seed(1)
    model = Logged()
    x = torch.arange(48.0).view(24, 2)
    loader = DataLoader(
        TensorDataset(x, torch.arange(24) % 3), batch_size=12 // (num_ranks // size)
    )
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = TensorParallelStrategy(
            backend="in_process",
            num_ranks=num_ranks,
            tensor_parallel_size=size,
            plan={"up": "colwise", "down": "rowwise"},
        )
    (logged,) = quiet_trainer(strategy=strategy).validate(model, loader, verbose=False)
    return logged, model


@pytest.mark.parametrize(("num_ranks", "size"), [(2, 2), (4, 2)])
def test_metrics_count_each_sample_once(num_ranks: int, size: int) -> None:
    """Metrics counted each sample once for every rank of a group."""
    alone, single = validate()
    logged, model = validate(num_ranks, size)
    for name in ("total", "sum", "by_mean" if num_ranks == size else "by_sum"):
        assert logged[name] == pytest.approx(alone[name]), name
    for name in ("confusion", "kept", "clone"):
        assert torch.equal(model.found[name], single.found[name]), name
    assert model.found["gathered"] == num_ranks // size
    assert all(metric.dist_sync_fn is None for metric in metrics_of(model))


@pytest.mark.parametrize("size", [2, 4])
def test_logged_values_are_those_of_as_many_data_parallel_ranks(size: int) -> None:
    logged, _ = validate(4, size)
    x = torch.arange(48.0).view(24, 2)
    num_groups = 4 // size
    sums = [
        [batch.sum() for batch in x[rank::num_groups].split(12 // num_groups)]
        for rank in range(num_groups)
    ]
    each = torch.tensor(sums)
    assert logged["by_sum"] == each.sum()
    assert logged["by_max"] == each.max()
    assert logged["by_min"] == each.min()
    assert logged["by_mean"] == each.mean()


def metrics_of(model: nn.Module) -> list[Metric]:
    return [module for module in model.modules() if isinstance(module, Metric)]


def _copied(rank: int) -> tuple[float, float, float]:
    group = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    module = nn.ModuleDict({"one": SumMetric(), "own": SumMetric(dist_sync_fn=_keep)})
    groups = MetricGroups(module, group)
    for metric in metrics_of(module):
        metric.update(float(rank + 1))
    copied, pickled = copy.deepcopy(module["one"]), pickle.loads(pickle.dumps(module["one"]))
    groups.restore()
    return copied.compute().item(), pickled.compute().item(), module["own"].compute().item()


def _keep(result: Tensor, group: Any) -> list[Tensor]:
    return [result]


def test_copies_keep_the_group_and_pickles_forget_it() -> None:
    assert run_ranks(_copied, 4) == [(3, 10, 1), (3, 10, 2), (7, 10, 3), (7, 10, 4)]
