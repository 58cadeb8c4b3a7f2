"""Parameters that user code exchanges, adds or takes out in mid-run train as on one device.

A table: what changes, under which stage, and in which hook.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelPruning
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_shard import (
    ConfigError,
    DDPStrategy,
    HybridParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.strategies.parity import ignoring
from tests.strategies.schemes import OfRanks
from tests.strategies.stacks import BATCH, Fitted, UpAndDown, fit, samples, trainer_of

pytestmark = ignoring(".*weight_norm` is deprecated", "Be aware that when using `ckpt_path`")

Change = Callable[[Any], object]
STAGES = ["shard_ddp", "zero1", "zero2", "zero3"]
FIRST, SECOND = 2, 3  # the steps after which a model changes


class Gated(nn.Module):
    """A parametrization that sets the parameter when it is registered."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.sigmoid(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * 2


def layer(module: Any) -> Any:
    return module.blocks[1].up


def tell(module: Any, params: Any) -> None:
    """Give parameters to the optimizer."""
    module.trainer.optimizers[0].add_param_group({"params": [*params]})


def prunes_at_random(module: Any) -> None:
    torch.manual_seed(5)
    prune.random_unstructured(layer(module), "weight", 0.4)


def prunes_globally(module: Any) -> None:
    weights = [(layer(module), "weight"), (module.head, "weight"), (module.embed, "bias")]
    prune.global_unstructured(weights, pruning_method=prune.L1Unstructured, amount=0.4)


def prunes_by_a_mask(module: Any) -> None:
    mask = torch.arange(layer(module).weight.numel()).view(layer(module).weight.shape) % 3 > 0
    prune.custom_from_mask(layer(module), "weight", mask)


def norms_and_tells(module: Any) -> None:
    parametrizations.weight_norm(layer(module))
    tell(module, layer(module).parametrizations.weight.parameters())


def norms_by_a_hook(module: Any) -> None:
    torch.nn.utils.weight_norm(layer(module))
    tell(module, (layer(module).weight_g, layer(module).weight_v))


def norms_by_the_spectrum(module: Any) -> None:
    torch.manual_seed(3)
    parametrizations.spectral_norm(layer(module))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(9)
    return make()


def replaces_head(module: Any) -> None:
    module.head = seeded(lambda: nn.Linear(8, 3))


def replaces_head_and_tells(module: Any) -> None:
    replaces_head(module)
    tell(module, module.head.parameters())


def widens_head_and_tells(module: Any) -> None:
    module.head = seeded(lambda: nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)))
    tell(module, module.head.parameters())


def exchanges_all_and_tells(module: Any) -> None:
    optimizer = module.trainer.optimizers[0]
    for param in module.head.parameters():
        optimizer.state.pop(param)  # torch saves no state without a parameter
    replaces_head(module)
    optimizer.param_groups[0]["params"] = [*module.parameters()]


def grows_and_tells(module: Any) -> None:
    module.blocks.append(seeded(UpAndDown))
    tell(module, module.blocks[-1].parameters())


def replaces_block_and_tells(module: Any) -> None:
    module.blocks[1] = seeded(UpAndDown)
    tell(module, module.blocks[1].parameters())


def keeps_head(module: Any) -> None:
    module.__dict__["kept"] = module.head
    replaces_head_and_tells(module)


def unprunes(module: Any) -> None:
    prune.remove(layer(module), "weight")


def prunes_once_more(module: Any) -> None:
    prune.l1_unstructured(layer(module), "weight", 0.3)


def removes(module: Any) -> None:
    parametrize.remove_parametrizations(layer(module), "weight")


def takes_head_back(module: Any) -> None:
    module.head = module.kept


def exchanges_blocks(module: Any) -> None:
    module.blocks[0], module.blocks[1] = module.blocks[1], module.blocks[0]


def shares_a_layer(module: Any) -> None:
    module.blocks[3].up = module.blocks[0].up


def nothing(_: Any) -> None:
    pass


CHANGES: dict[str, tuple[Change, Change]] = {
    "prune": (lambda m: prune.l1_unstructured(layer(m), "weight", 0.4), unprunes),
    "prune at random": (prunes_at_random, prunes_once_more),
    "prune rows": (lambda m: prune.ln_structured(layer(m), "weight", 0.5, n=2, dim=0), unprunes),
    "prune globally": (prunes_globally, nothing),
    "prune by a mask": (prunes_by_a_mask, unprunes),
    "parametrize": (
        lambda m: parametrize.register_parametrization(layer(m), "weight", nn.Softplus()),
        removes,
    ),
    "parametrize by an inverse": (
        lambda m: parametrize.register_parametrization(layer(m), "weight", Gated()),
        removes,
    ),
    "weight norm": (lambda m: parametrizations.weight_norm(layer(m)), removes),
    "weight norm, told": (norms_and_tells, removes),
    "weight norm by a hook": (norms_by_a_hook, nothing),
    "spectral norm": (norms_by_the_spectrum, removes),
    "orthogonal": (lambda m: parametrizations.orthogonal(layer(m)), removes),
    "head": (replaces_head, nothing),
    "head, told": (replaces_head_and_tells, replaces_head),
    "head of another shape": (widens_head_and_tells, nothing),
    "head, all told": (exchanges_all_and_tells, nothing),
    "head and back": (keeps_head, takes_head_back),
    "one more block": (grows_and_tells, nothing),
    "another block": (replaces_block_and_tells, nothing),
    "two blocks exchanged": (exchanges_blocks, exchanges_blocks),
    "a layer in two blocks": (shares_a_layer, nothing),
}
HOOKS = [
    "on_train_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_epoch_end",
]
AMID_A_GRAPH = ("on_before_zero_grad", "on_before_backward")


class Changing(OfRanks):
    """Changes in one of its hooks, twice."""

    block = UpAndDown
    changes: tuple[Change, Change]
    makes: Any = staticmethod(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))

    def configure_optimizers(self) -> Any:
        return self.makes(self.parameters())

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def change(self) -> None:
        """Change once at each of the two steps."""
        done = self.__dict__.setdefault("done", [])
        of_epoch = 5  # steps
        for number, step in enumerate((FIRST, SECOND)):
            comes = self.global_step >= (step if number in self.by_steps else number * of_epoch)
            if comes and len(done) == number and not self.trainer.sanity_checking:
                done.append(number)
                self.changes[number](self)
                return

    by_steps: tuple[int, ...] = (0, 1)


@cache
def changing(kind: str, hook: str, optimizer: str = "sgd", **more: Any) -> type[Changing]:
    def called(self: Changing, *_: Any) -> None:
        self.change()

    by_steps = () if hook in ("on_train_start", "on_validation_epoch_end") else (0, 1)
    found: dict[str, Any] = {hook: called, "changes": CHANGES[kind], "by_steps": by_steps}
    if optimizer == "adam":
        found["makes"] = staticmethod(lambda params: torch.optim.Adam(params, lr=0.01))
    return type("Style", (Changing,), found)


@cache
def alone(style: type[Changing], **options: Any) -> Fitted:
    return fit(style, **options)


def assert_alike(got: Fitted, expected: Fitted) -> None:
    torch.testing.assert_close(got.curve.losses, expected.curve.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-5, atol=1e-5)


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", CHANGES)
def test_exchanged_parameters_train_as_on_one_device(kind: str, stage: str, hook: str) -> None:
    """Parameters of another shape, or of no place that was known, were refused by name."""
    edits = ("parametrize", "prune", "orthogonal", "spectral norm")
    if hook in AMID_A_GRAPH and kind.startswith(edits):
        hook = "on_train_batch_start"  # one device refuses edits in place of what a graph has
    style = changing(kind, hook)
    assert_alike(fit(style, f"{stage}_in_process", devices=2), alone(style))


@pytest.mark.each_value
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["one more block", "head of another shape", "weight norm"])
def test_an_average_of_other_parameters_is_refused_by_name(kind: str, stage: str) -> None:
    """The teardown of what was half laid out anew failed in its place, on tensors on meta."""
    style = changing(kind, "on_train_batch_end")
    with pytest.raises(ConfigError, match="EMAWeightAveraging has copied 20 parameters"):
        fit(style, f"{stage}_in_process", [EMAWeightAveraging()], devices=2)


def test_ranks_see_blocks_exchanged_alike() -> None:
    """Shapes of shards, which differ between ranks, told whether a model was laid out anew."""
    style = changing("two blocks exchanged", "on_train_batch_end")
    assert_alike(fit(style, "zero3_in_process", devices=2), alone(style))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("stage", ["zero3", "zero2"])
def test_narrow_copies_go_on_with_wide_gradients(stage: str, accumulated: int) -> None:
    """Parameters that show a narrow copy were given the wide gradients of before the layout."""
    style = changing("head of another shape", "on_train_batch_end", "adam")
    options: dict[str, Any] = {"accumulate_grad_batches": accumulated, "precision": "bf16-mixed"}
    got, expected = fit(style, f"{stage}_in_process", devices=2, **options), fit(style, **options)
    torch.testing.assert_close(got.curve.losses, expected.curve.losses, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got.weights, expected.weights, rtol=2e-2, atol=2e-2)


class HoldsGroup(Changing):
    """Sets its learning rate in a group that it has kept."""

    changes = (replaces_head_and_tells, nothing)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.__dict__["group"] = optimizer.param_groups[0]
        return optimizer

    def on_train_batch_end(self, *_: Any) -> None:
        self.change()
        self.group["lr"] *= 0.7


def test_groups_that_user_code_holds_are_those_of_the_optimizer() -> None:
    """A layout gave the optimizer other groups, so that rates were set where nothing read them."""
    assert_alike(fit(HoldsGroup, "zero2_in_process", devices=2), fit(HoldsGroup))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["one more block", "weight norm, told"])
def test_what_optimizers_keep_and_sum_up_goes_on(kind: str, stage: str) -> None:
    """A model that was laid out anew would lose moments, and the gradients of earlier batches."""

    def amid(self: Changing, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self.change()

    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    style = changing(kind, "on_train_batch_start", "adam")
    summing = type("Summing", (style,), {"on_train_batch_start": amid})
    if kind in LOSING:
        with pytest.raises(ConfigError, match=r"was given a parameter of shape"):
            fit(summing, f"{stage}_in_process", devices=2, **options)
        return
    got = fit(summing, f"{stage}_in_process", devices=2, **options)
    assert_alike(got, fit(summing, **options))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", ["shard_ddp", "zero2", "zero3"])
@pytest.mark.parametrize("kind", ["weight norm, told", "weight norm", "head of another shape"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_end"])
def test_what_is_exchanged_last_is_saved_and_left_full(
    hook: str, kind: str, stage: str, tmp_path: Path
) -> None:
    """What a hook had made of shards just before a save, or the end, stayed in shards."""

    def last(self: Changing, *_: Any) -> None:
        if self.global_step == 10:
            self.changes[0](self)
            if hook == "on_train_batch_end":
                self.trainer.save_checkpoint(tmp_path / "last.ckpt")

    style = type(
        "Last", (changing(kind, "on_train_start"),), {hook: last, "on_train_start": nothing}
    )
    expected = fit(style).weights
    found = [torch.load(tmp_path / "last.ckpt")] if hook == "on_train_batch_end" else []
    got = fit(style, f"{stage}_in_process", devices=2).weights
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for alone in found:
        ours = torch.load(tmp_path / "last.ckpt")
        for key in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(ours[key], alone[key], rtol=1e-5, atol=1e-5)


LOSING = ["weight norm, told"]  # parameters that have a gradient of the batch before


def hybrid(zero_stage: Any) -> Any:
    return HybridParallelStrategy(
        backend="in_process", data_parallel_size=(2, 2), zero_stage=zero_stage
    )


OTHERS: dict[str, tuple[int, Callable[[], Any]]] = {
    "copies of zero2": (4, lambda: hybrid(2)),
    "copies of zero3": (4, lambda: hybrid(3)),
    "offload": (2, lambda: ZeRO3Strategy(backend="in_process", offload="parameters")),
    "same bits": (2, lambda: ZeRO3Strategy(backend="in_process", same_bits=True)),
    "recomputing": (
        2,
        lambda: ZeRO3Strategy(backend="in_process", activation_checkpointing=["UpAndDown"]),
    ),
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", ["another block", "weight norm, told"])
def test_exchanged_parameters_train_under_other_options(kind: str, other: str) -> None:
    num_ranks, make = OTHERS[other]
    style = changing(kind, "on_train_batch_end", "adam")
    assert_alike(fit(style, make(), devices=num_ranks), alone(style))


class Net(nn.Module):
    """The network of the table, for a loop of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(UpAndDown() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.Sequential(*self.blocks)(self.embed(x)))


class Held:
    """Has optimizers, as a trainer has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers = [optimizer]


def train(fabric: Fabric, kind: str, found: list[Any], *, clips: bool = False) -> None:
    """Train five steps, between which the model changes, or before gradients are clipped."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    module, stepped = fabric.setup(net, optimizer)
    vars(net)["trainer"] = Held(optimizer)
    losses, (x, y) = [], samples()
    rank, size = fabric.global_rank, fabric.world_size
    for step in range(5):
        change = CHANGES[kind][step - FIRST] if step in (FIRST, SECOND) else nothing
        if not clips:
            change(net)
        rows = slice(step * BATCH + rank, (step + 1) * BATCH, size)
        loss = F.cross_entropy(module(x[rows]), y[rows])
        stepped.zero_grad()
        fabric.backward(loss)
        if clips:
            change(net)
            fabric.clip_gradients(module, stepped, max_norm=0.05)
        stepped.step()
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    moments = fabric.strategy.get_optimizer_state(optimizer)["state"]
    if rank == 0:
        found += [losses, state, moments]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", CHANGES)
def test_between_steps_of_a_loop_parameters_are_exchanged(kind: str, stage: str) -> None:
    """A mask that was computed from shards was a shard in the state of the module."""
    alone: list[Any] = []
    train(Fabric(accelerator="cpu", devices=1), kind, alone)
    got: list[Any] = []
    fabric = Fabric(accelerator="cpu", devices=2, strategy=f"{stage}_in_process")
    fabric.launch(train, kind, got)
    torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_gradients_of_a_loop_are_clipped_after_a_block_was_added(stage: str) -> None:
    """The optimizer was refused, as one of a module that was not set up."""
    alone: list[Any] = []
    train(Fabric(accelerator="cpu", devices=1), "one more block", alone, clips=True)
    got: list[Any] = []
    fabric = Fabric(accelerator="cpu", devices=2, strategy=f"{stage}_in_process")
    fabric.launch(train, "one more block", got, clips=True)
    torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-5)


class Pruned(OfRanks):
    """Takes the masks of a checkpoint, whose module is pruned from the beginning."""

    block = UpAndDown
    resumes = False

    def pruned(self) -> list[tuple[nn.Module, str]]:
        return [(self.blocks[1].up, "weight"), (self.head, "weight")]  # type: ignore[list-item]

    def configure_model(self) -> None:
        for module, name in self.pruned() if self.resumes else ():
            if not prune.is_pruned(module):
                prune.identity(module, name)

    def configure_optimizers(self) -> Any:
        named = sorted(self.named_parameters())  # in the same order with masks
        return torch.optim.Adam([param for _, param in named], lr=0.01)


class Resumed(Pruned):
    resumes = True


class Prunes(ModelPruning):
    """Prunes what the module says, once."""

    def __init__(self) -> None:
        super().__init__(
            "l1_unstructured",
            amount=lambda epoch: 0.4 if epoch == 0 else 0.0,
            make_pruning_permanent=False,
            use_lottery_ticket_hypothesis=False,
        )

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self._parameters_to_prune = pl_module.pruned()
        super().setup(trainer, pl_module, stage)


def saved(folder: Path, strategy: Any = "auto", **options: Any) -> Path:
    save = ModelCheckpoint(dirpath=folder, filename="end", save_on_train_epoch_end=True)
    fit(Pruned, strategy, [Prunes(), save], enable_checkpointing=True, **options)
    return next(folder.iterdir())


def resumed(path: Path, strategy: Any = "auto", **options: Any) -> dict[str, Tensor]:
    model = Resumed()
    trainer_of(strategy, max_epochs=4, **options).fit(model, ckpt_path=path, weights_only=False)
    return dict(model.state_dict())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("stage", ["shard_ddp", "zero2", "zero3"])
def test_masks_of_a_pruned_run_are_kept_through_a_resume(
    stage: str, form: str, num_ranks: int, tmp_path: Path
) -> None:
    kind = {"shard_ddp": DDPStrategy, "zero2": ZeRO2Strategy, "zero3": ZeRO3Strategy}[stage]
    first, then = (kind(backend="in_process", checkpoint_format=form) for _ in range(2))
    path = saved(tmp_path / "ranks", first, devices=2)
    got = resumed(path, then, devices=num_ranks)
    assert any(name.endswith("weight_mask") for name in got)
    torch.testing.assert_close(got, resumed(saved(tmp_path / "alone")), rtol=1e-5, atol=1e-5)
