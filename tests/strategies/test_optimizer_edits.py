"""What hooks do to an optimizer, or put in its place, is a single device's, or refused."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_shard import ConfigError, TensorParallelStrategy
from tests.features.columns import COLUMNS, ONE_DEVICE, Column, Here
from tests.features.network import Network, fitted, weights
from tests.strategies.parity import ignoring
from tests.strategies.schemes import OfRanks
from tests.strategies.stacks import Fitted, UpAndDown, fit, pipeline

pytestmark = ignoring()

Edit = Callable[[Any], object]
ROW = 3  # the step after which groups and parameters are changed


class Edited(OfRanks):
    """Edits after each batch, or before each update."""

    block = UpAndDown
    after: Edit
    before: Edit

    def configure_optimizers(self) -> Any:
        params = [*self.parameters()]
        groups = [{"params": params[:-2]}, {"params": params[-2:], "lr": 0.05}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        type(self).after(self)

    def on_before_optimizer_step(self, _: Any) -> None:
        type(self).before(self)


def nothing(_: Any) -> None:
    pass


def style(after: Edit, before: Edit = nothing, base: type[Edited] = Edited) -> type[Edited]:
    return type("Style", (base,), {"after": after, "before": before})


@cache
def alone(after: Edit, before: Edit = nothing, base: type[Edited] = Edited) -> Fitted:
    return fit(style(after, before, base))


def fit_on_ranks(
    strategy: str, after: Edit, before: Edit = nothing, base: type[Edited] = Edited
) -> Fitted:
    made = style(after, before, base)
    if strategy == "pipeline":
        return fit(made, pipeline(2, "1f1b", num_microbatches=2))
    if strategy.startswith("tensor"):
        stage = 3 if strategy.endswith("zero3") else 0
        return fit(
            made,
            TensorParallelStrategy(
                backend="in_process",
                num_ranks=4 if stage else 2,
                tensor_parallel_size=2,
                zero_stage=stage,
            ),
        )
    return fit(made, f"{strategy}_in_process", devices=2)


def assert_as_alone(
    strategy: str, after: Edit, before: Edit = nothing, base: type[Edited] = Edited
) -> None:
    got, expected = fit_on_ranks(strategy, after, before, base), alone(after, before, base)
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-5, atol=1e-5)


def state_of(module: Any) -> Any:
    return module.trainer.optimizers[0].state


def resets(module: Any) -> None:
    for param in module.parameters():
        state_of(module)[param]["momentum_buffer"] = torch.zeros_like(param)


def resets_where_there_is(module: Any) -> None:
    for param in module.parameters():
        if param in state_of(module):
            state_of(module)[param]["momentum_buffer"] = torch.zeros_like(param)


def halves(module: Any) -> None:
    for param in module.parameters():
        entries = state_of(module)[param]
        entries["momentum_buffer"] = entries["momentum_buffer"] * 0.5


def keeps_gradients(module: Any) -> None:
    for param in module.parameters():
        state_of(module)[param]["momentum_buffer"] = param.grad.clone()


def pops_group(module: Any) -> None:
    if module.global_step == ROW:
        module.trainer.optimizers[0].param_groups.pop()


def pops_parameter(module: Any) -> None:
    if module.global_step == ROW:
        module.trainer.optimizers[0].param_groups[0]["params"].pop(2)


def replace(module: Any) -> None:
    if module.global_step == ROW:
        module.head.weight = nn.Parameter(module.head.weight.detach().clone() * 0.5)


def replaces_and_gives(module: Any) -> None:
    old = module.head.weight
    replace(module)
    for group in module.trainer.optimizers[0].param_groups:
        group["params"] = [module.head.weight if p is old else p for p in group["params"]]


def replaces_and_adds(module: Any) -> None:
    replace(module)
    if module.global_step == ROW:
        added = {"params": [module.head.weight], "lr": 0.03}
        module.trainer.optimizers[0].add_param_group(added)


def replaces_and_makes_another(module: Any) -> None:
    replace(module)
    if module.global_step == ROW:
        made = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        module.trainer.strategy.optimizers = [made]


def prunes(module: Any) -> None:
    if module.global_step == ROW:
        prune.l1_unstructured(module.blocks[1].up, "weight", 0.5)


ALL = ["shard_ddp", "zero1", "zero3", "pipeline", "tensor", "tensor_zero3"]
EDITS = [
    resets,
    resets_where_there_is,
    halves,
    pops_group,
    pops_parameter,
    replaces_and_gives,
    replaces_and_adds,
    replaces_and_makes_another,
]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_an_optimizer_is_one_devices(edit: Edit, strategy: str) -> None:
    """An edit of an optimizer raised or was lost."""
    assert_as_alone(strategy, edit)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("edit", [resets_where_there_is, keeps_gradients])
def test_an_edit_before_an_update_counts(edit: Edit, strategy: str) -> None:
    """An edit before an update raised."""
    assert_as_alone(strategy, nothing, edit)


class ByHand(Edited):
    """Accumulates by hand, decays some weights, and edits its optimizer's state in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.parameters() if param.ndim > 1]
        others = [param for param in self.parameters() if param.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
            for param in self.parameters():
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
        return loss


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "tensor", "tensor_zero3"])
def test_an_edit_inside_a_step_is_one_devices(strategy: str) -> None:
    """Under tensor parallel a step's parameters were not found in the state: no edit arrived."""
    assert_as_alone(strategy, nothing, base=ByHand)


LOST = r"'head\.weight' was replaced by another parameter"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero3", "tensor_zero3"])
def test_a_parameter_that_the_optimizer_has_lost_is_not_trained(strategy: str) -> None:
    """A parameter that the optimizer has lost was trained on."""
    with pytest.warns(UserWarning, match=LOST):
        assert_as_alone(strategy, replace)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero3", "tensor_zero3"])
def test_a_lost_parameter_takes_the_step_of_one_device(strategy: str) -> None:
    """A lost parameter took the step of its gradient."""
    with pytest.warns(UserWarning, match=LOST):
        assert_as_alone(strategy, nothing, replace)


@pytest.mark.filterwarnings(f"ignore:{LOST}")
@pytest.mark.parametrize(
    ("strategy", "hook"), [(one, hook) for one in ("tensor", "pipeline") for hook in (0, 1)]
)
def test_a_lost_parameter_that_has_a_gradient_is_refused(strategy: str, hook: int) -> None:
    """A lost parameter that has a gradient was trained on."""
    edits: list[Edit] = [nothing, nothing]
    edits[hook] = replace
    with pytest.raises(ConfigError, match=LOST):
        fit_on_ranks(strategy, *edits)


@pytest.mark.filterwarnings(f"ignore:{LOST}")
def test_a_lost_parameter_that_is_unfrozen_is_refused() -> None:
    """A lost parameter that was unfrozen was trained on."""

    def unfreeze(module: Any) -> None:
        replace(module)
        if module.global_step > ROW:
            module.requires_grad_(requires_grad=True)

    with pytest.raises(ConfigError, match=LOST):
        fit_on_ranks("zero2", unfreeze)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_loading_by_assigning_loses_no_parameter(strategy: str) -> None:
    def load(module: Any) -> None:
        if module.global_step == ROW:
            values = {name: torch.ones_like(one) for name, one in module.head.state_dict().items()}
            module.head.load_state_dict(values, assign=True)

    head = fit_on_ranks(strategy, load).model.head
    assert not torch.equal(head.weight, torch.ones_like(head.weight))


def gives_a_stranger(module: Any) -> None:
    if module.global_step == ROW:
        added = nn.Parameter(torch.ones(3))
        module.trainer.optimizers[0].add_param_group({"params": [added]})


def gives_a_stranger_with_a_gradient(module: Any) -> None:
    gives_a_stranger(module)
    if module.global_step == ROW:
        added = module.trainer.optimizers[0].param_groups[-1]["params"][0]
        vars(module)["stranger"] = added


class UsesStranger(Edited):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(getattr(self, "stranger", torch.zeros(3)))


@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2", "pipeline"])
def test_a_parameter_of_no_model_is_refused(strategy: str) -> None:
    """A parameter of no model was a key error."""
    with pytest.raises(ConfigError, match=r"given a parameter of shape \(3,\) in the middle"):
        fit_on_ranks(strategy, gives_a_stranger_with_a_gradient, base=UsesStranger)


@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2"])
def test_a_parameter_of_no_model_without_a_gradient_stays_as_it_is(strategy: str) -> None:
    assert_as_alone(strategy, gives_a_stranger)


def test_pruning_inside_a_pipeline_is_refused() -> None:
    """Pruning inside a pipeline was a key error."""
    with pytest.raises(ConfigError, match=r"'blocks\.1\.up\.weight' was taken out of its module"):
        fit_on_ranks("pipeline", prunes)


@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2", "zero3"])
def test_pruning_in_a_hook_is_a_single_devices(strategy: str) -> None:
    assert_as_alone(strategy, prunes)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "pipeline", "tensor"])
def test_parameters_tied_by_their_data_are_refused(strategy: str) -> None:
    """Parameters tied by their data came apart."""

    class Tied(Edited):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].up.weight.data = self.blocks[0].up.weight.data  # type: ignore[union-attr]

    with pytest.raises(ConfigError, match="share memory without being one parameter"):
        fit_on_ranks(strategy, nothing, base=Tied)


class Exchanges(Callback):
    """Trains the head alone by another optimizer for two steps, then goes back to the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            self.first = trainer.optimizers
            trainer.optimizers = [torch.optim.SGD(pl_module.head.parameters(), 0.01, momentum=0.5)]
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.folder / "head.ckpt")
            trainer.strategy.optimizers = self.first


class OfTheHead(Network):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), 0.01, momentum=0.5)


def trained(column: Column, folder: Path) -> list[dict[str, Tensor]]:
    """Return the weights of a fit, and of one that resumes while the other optimizer trains."""
    here, module, resumed = Here(column, folder / column.name), Network(), OfTheHead()
    fitted(here, module, callbacks=[Exchanges(here.folder)])
    fitted(here, resumed, ckpt_path=here.folder / "head.ckpt")
    return [weights(module), weights(resumed)]


@pytest.mark.filterwarnings("ignore:.*loading dataloaders .*checkpoint")
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["zero2", "zero3", "pipeline_parallel"])
def test_an_exchanged_optimizer_trains_as_on_one_device(name: str, tmp_path: Path) -> None:
    """An exchanged optimizer met shards as if they were all."""
    got, expected = trained(COLUMNS[name], tmp_path), trained(ONE_DEVICE, tmp_path)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


class Exchanged(Callback):
    def __init__(self, make: Any) -> None:
        self.make = make

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.optimizers = [self.make(trainer.global_rank)(pl_module.parameters(), lr=0.1)]


@pytest.mark.filterwarnings("ignore:.*loading dataloaders .*checkpoint")
@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("name", "kinds", "message"),
    [
        ("local_sgd", ("SGD", "SGD"), "works with those that configure_optimizers has returned"),
        ("elastic", ("SGD", "SGD"), "works with those that configure_optimizers has returned"),
        ("zero2", ("SGD", "Adam"), "SGD.* on rank 0 and .*Adam.* on rank 1"),
        ("zero2", ("LBFGS", "LBFGS"), "LBFGS does not update each element by itself"),
    ],
)
def test_an_exchanged_optimizer_that_cannot_be_right_is_refused(
    name: str, kinds: tuple[str, str], message: str, tmp_path: Path
) -> None:
    exchanged = Exchanged(lambda rank: getattr(torch.optim, kinds[rank]))
    with pytest.raises(ConfigError, match=message):
        fitted(Here(COLUMNS[name], tmp_path), callbacks=[exchanged])
