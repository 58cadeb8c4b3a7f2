"""What a plan compares trains: each strategy is asked what the module and its optimizers allow."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard
from lightning_shard.errors import ConfigError
from lightning_shard.planning import search
from lightning_shard.planning.anatomy import Anatomy
from lightning_shard.planning.candidates import PlanCandidate, SearchSpace
from lightning_shard.planning.dry_run import attached
from lightning_shard.planning.estimate import Estimate
from lightning_shard.planning.plan import Plan
from lightning_shard.planning.search import _asking, plan, simulated
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()
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


class Small(L.LightningModule):
    """A net without blocks, so that little is searched."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.embed(rows)).tanh())
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class OfFewSteps(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class OfMatrices(Small):
    """Muon takes matrices alone: what else there is has an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for one in optimizers:
            one.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for one in optimizers:
            one.step()

    def configure_optimizers(self) -> Any:
        matrices = [one for one in self.parameters() if one.ndim == 2]
        others = [one for one in self.parameters() if one.ndim != 2]
        return [torch.optim.Muon(matrices, lr=0.1), torch.optim.SGD(others, lr=0.1)]


class Rows(Small):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 4, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(self.rows(rows.argmax(dim=-1)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TiedWeights(Small):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 8)
        self.again.weight = self.embed.weight

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) + self.again(rows)[:, :4]


class FrozenParts(Small):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=0.01)


class Compiled(Small):
    def __init__(self) -> None:
        super().__init__()
        self.embed.compile(backend="eager")


class PenaltyOnInputs(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch[0].detach().requires_grad_()
        found = self(rows)
        (grad,) = torch.autograd.grad(found.sum(), rows, create_graph=True)
        return found.square().mean() + grad.square().sum(dim=1).mean()


class BatchNormed(Small):
    """Takes no single sample in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]


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


def names(made: PlanCandidate) -> set[str]:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan's dry runs ended in an error, since the module was attached to no trainer."""
    monkeypatch.chdir(tmp_path)  # to which the choice is written
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


WITH_BLOCKS = (Net, Scheduled, Frozen, CompiledWhole)
KINDS = (
    *(Gan, OfFewSteps, PenaltyOnInputs, BatchNormed, OfMatrices, Rows),
    *(TiedWeights, FrozenParts, Compiled, Small),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in WITH_BLOCKS),
)


def trained(kind: type[L.LightningModule], options: dict[str, Any], samples: int) -> dict[str, Any]:
    torch.manual_seed(1)
    module = kind()
    data = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    steps = {"gradient_clip_val": None, "max_epochs": 2, "max_steps": -1}  # of all samples each
    trainer = quiet_trainer(**steps | options)
    trainer.fit(module, DataLoader(data, batch_size=samples))
    return module.state_dict()


@pytest.mark.few_cases(2)
@pytest.mark.filterwarnings("ignore:offload=.* saves nothing on CPU ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recommended_trains_as_on_one_device(
    kind: type[L.LightningModule], tmp_path: Path
) -> None:
    """A plan failed for a penalty and a batch norm, and LBFGS was to accumulate gradients.

    Each kind is trained under what is recommended, and under what takes the least memory.
    """
    found = on_two_devices(kind())
    least = min(found.estimates, key=lambda one: one.peak_bytes)
    assert found.recommendation is not None
    options: dict[str, Any] = {"default_root_dir": tmp_path, "accumulate_grad_batches": 1}
    expected = trained(kind, {**options, "devices": 1, "strategy": "auto"}, 8)
    for made in {found.recommendation.candidate, least.candidate}:
        strategy = getattr(lightning_shard, made.class_name)(backend="in_process", **made.options())
        options |= {"accumulate_grad_batches": made.accumulated, "devices": 2}
        weights = trained(kind, {**options, "strategy": strategy}, made.batch_size)
        if kind is BatchNormed:  # each rank's samples have a mean of their own
            expected = weights
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


class SparseRows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8, sparse=True)  # type: ignore[assignment]


@pytest.mark.slow
def test_gradients_of_some_rows_are_planned_for() -> None:
    """Torch's error of a sparse tensor's storage ended the plan."""
    found = plan(
        SparseRows(), [torch.zeros(8, dtype=torch.int64)], devices=2, device_memory=1 << 30
    )
    assert found.recommendation is not None


def on_two_devices(module: L.LightningModule, **options: Any) -> Plan:
    return plan(
        module,
        [torch.zeros(4, 4)],
        devices=2,
        global_batch=8,
        machine="cpu",
        precision="32-true",
        checkpointing=(None,),
        **options,
    )


def test_a_plan_goes_on_where_what_it_recommends_cannot_be_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of the first dry run ended the plan; the error is named beside what it left out."""
    first = on_two_devices(Small()).recommendation
    assert first is not None

    def failing(anatomy: Anatomy, one: Estimate, ranks_per_node: int) -> Estimate:
        if one.candidate.strategy == first.candidate.strategy:
            raise ZeroDivisionError("no ranks")
        return simulated(anatomy, one, ranks_per_node)

    monkeypatch.setattr(search, "simulated", failing)
    found = on_two_devices(Small())
    assert found.recommendation is not None
    name = first.candidate.strategy
    assert found.recommendation.candidate.strategy != name
    assert found.recommendation.is_simulated
    assert f"{name}: looking at it has raised ZeroDivisionError: no ranks" in found.left_out
    monkeypatch.setattr(search, "simulated", lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match=r"No candidate .* raised ZeroDivisionError: division by"):
        on_two_devices(Small())


def test_an_error_at_one_kind_of_candidate_leaves_out_that_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only refusals of pipelines were caught: any other error ended the plan."""

    def failing(made: PlanCandidate) -> str:
        if made.offload:
            raise KeyError("offload")
        if made.zero_stage == 3:
            raise ConfigError("Stage 3 takes no Small.")
        return ""

    of = search.strategy_of
    monkeypatch.setattr(
        search, "strategy_of", lambda anatomy, made: failing(made) or of(anatomy, made)
    )
    found = on_two_devices(Small())
    assert {one.candidate.strategy for one in found.estimates} == {"shard_ddp", "zero1", "zero2"}
    assert found.left_out[1:] == (
        "zero2 with offload='optimizer', zero3 with offload='parameters': looking at it has raised "
        "KeyError: 'offload'",
        "zero3: Stage 3 takes no Small.",
    )


def test_layers_planned_by_number_are_found_in_a_few_blocks() -> None:
    """Two of four blocks were looked at for entries of the third, so that none were split."""
    module = Net()
    anatomy = Anatomy(module, [torch.zeros(4, 4)], "32-true", None)
    anatomy.plan = {f"blocks.{place}": "colwise_gather_output" for place in range(4)}
    for num_blocks in (2, 3):
        assert anatomy.unpipelined(2, None).saved.at(2, num_blocks) > 0
    anatomy.plan = {**anatomy.plan, "blocks.9": "colwise_gather_output"}
    with pytest.raises(ConfigError, match=r"'blocks\.9' matches no module"):
        anatomy.unpipelined(2, "full")


def test_layers_to_split_are_found_on_meta_as_with_values() -> None:
    """Tensor parallel was not searched for a module on meta, the usual one of a plan."""
    with torch.device("meta"):
        module = Small()
    without, having = on_two_devices(module), on_two_devices(Small())
    assert without.left_out == having.left_out
    assert [str(one.candidate) for one in without.estimates] == [
        str(one.candidate) for one in having.estimates
    ]


def test_a_batch_norm_is_planned_with_two_samples_a_forward_at_least() -> None:
    """A single sample was tried, which a batch norm refuses in training."""
    found = on_two_devices(BatchNormed())
    assert min(one.candidate.microbatch for one in found.estimates) == 2
    assert any(one.startswith("1 sample a forward: ValueError") for one in found.left_out)


class Unready(Net):
    def configure_optimizers(self) -> Any:
        raise ValueError("the data's size is not known")


def test_a_plan_tells_why_optimizers_cannot_be_made() -> None:
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
