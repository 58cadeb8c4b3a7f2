"""Parameters that modules lose, gain or tie in mid-run: as on one device, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from lightning_shard import (
    ConfigError,
    DDPStrategy,
    LocalSGDStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.strategies.decoders import (
    DECODER_SCHEMES,
    VOCABULARY,
    Decoder,
    assert_as_alone,
    fit_decoder,
)
from tests.strategies.parity import ignoring
from tests.strategies.stacks import fit

pytestmark = ignoring(
    ".*microbatches are fewer than the", "A step uses .* parameters outside of their stage"
)


class LosesBias(Decoder):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head.bias = None  # type: ignore[assignment]


class LosesBlock(Decoder):
    def build(self) -> None:
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks = self.blocks[:3]


class GainsLayer(Decoder):
    def on_fit_start(self) -> None:
        torch.manual_seed(9)
        self.extra = nn.Linear(VOCABULARY, VOCABULARY).double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.extra(super().forward(tokens))


LOSING = [LosesBias, LosesBlock, GainsLayer]


def checkpoint_of(style: type[Decoder], strategy: Any, folder: Path, devices: int) -> Path:
    saves = ModelCheckpoint(dirpath=folder, filename="end", save_on_train_epoch_end=True)
    fit(style, strategy, [saves], devices=devices, enable_checkpointing=True)
    return folder / "end.ckpt"


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", DECODER_SCHEMES)
@pytest.mark.parametrize("style", LOSING)
def test_a_checkpoint_after_a_module_lost_or_gained_a_parameter_is_one_devices(
    style: type[Decoder], scheme: str, tmp_path: Path
) -> None:
    """A checkpoint after a module lost or gained a parameter was a key error."""
    num_ranks, make = DECODER_SCHEMES[scheme]
    got = torch.load(checkpoint_of(style, make(), tmp_path / "ranks", num_ranks))
    alone = torch.load(checkpoint_of(style, "auto", tmp_path / "alone", 1))
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(got[key], alone[key], rtol=1e-9, atol=1e-9)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("style", LOSING)
@pytest.mark.parametrize("strategy", [DDPStrategy, ZeRO2Strategy, ZeRO3Strategy, LocalSGDStrategy])
def test_a_folder_is_written_after_a_module_lost_or_gained_a_parameter(
    strategy: Any, style: type[Decoder], tmp_path: Path
) -> None:
    """A folder after a module lost or gained a parameter was a key error."""
    options: Any = {"sync_every": 1} if strategy is LocalSGDStrategy else {}
    sharded = strategy(backend="in_process", checkpoint_format="sharded", **options)
    assert checkpoint_of(style, sharded, tmp_path, 2).is_dir()


class TiesAtStart(Decoder):
    def on_fit_start(self) -> None:
        self.head.weight = self.embed.weight


class Swaps(Decoder):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            one, other = self.blocks[0].up, self.blocks[1].up
            one.weight, other.weight = other.weight, one.weight  # type: ignore[union-attr]


class TiesNewOne(Decoder):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head.weight = self.embed.weight = nn.Parameter(self.head.weight.detach().clone())


TYING = [TiesAtStart, Swaps, TiesNewOne]
OF_FULL_LAYERS = ["shard_ddp", "zero2", "zero3", "context", "context_zero3"]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", OF_FULL_LAYERS)
@pytest.mark.parametrize("style", TYING)
def test_parameters_tied_by_assigning_in_mid_run_train_as_on_one_device(
    style: type[Decoder], scheme: str
) -> None:
    """Parameters tied by assigning in mid run were untied, and then refused."""
    assert_as_alone(style, scheme)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", [one for one in DECODER_SCHEMES if one not in OF_FULL_LAYERS])
@pytest.mark.parametrize("style", TYING)
def test_tying_parameters_of_split_layers_in_mid_run_is_refused(
    style: type[Decoder], scheme: str
) -> None:
    """Parameters tied by assigning in mid run were untied and left out of the updates."""
    refused = r"was replaced by the parameter of|the model holds|reads elements of"
    with pytest.raises(ConfigError, match=refused):
        fit_decoder(style, scheme)


class Gated(nn.Module):
    """A parametrization that sets the parameter when it is registered."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.sigmoid(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * 2


class Parametrizes(Decoder):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            parametrize.register_parametrization(self.head, "bias", nn.Softplus())


class ParametrizesByAnInverse(Decoder):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            parametrize.register_parametrization(self.blocks[1].up, "weight", Gated())
        if self.global_step == 6:
            parametrize.remove_parametrizations(self.blocks[1].up, "weight")


class RemovesOne(Decoder):
    def build(self) -> None:
        parametrize.register_parametrization(self.blocks[1].up, "bias", nn.Softplus())

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            parametrize.remove_parametrizations(self.blocks[1].up, "bias")


PARAMETRIZING = [Parametrizes, ParametrizesByAnInverse]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["tensor", "tensor_zero3", "2x2x2"])
@pytest.mark.parametrize("style", PARAMETRIZING)
def test_a_parametrization_of_a_split_layer_in_mid_run_is_refused(
    style: type[Decoder], scheme: str
) -> None:
    """A parametrization in mid run was an error of the teardown's, or torch's own of sizes."""
    with pytest.raises(ConfigError, match=r"was taken out of its module"):
        fit_decoder(style, scheme)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero2", "zero3", "context"])
@pytest.mark.parametrize("style", [*PARAMETRIZING, RemovesOne])
def test_a_parametrization_in_mid_run_is_a_single_devices(
    style: type[Decoder], scheme: str
) -> None:
    """Ranks of one process shared the class whose property torch removes."""
    assert_as_alone(style, scheme)


class NormsWeights(Decoder):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            parametrizations.weight_norm(self.head)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["zero3", "context_zero3"])
def test_parameters_that_hooks_make_of_shards_are_one_devices(scheme: str) -> None:
    """The fit ended in an error that what was read of shards is used after its run."""
    assert_as_alone(NormsWeights, scheme)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["tensor_zero3", "2x2x2_zero3"])
def test_parameters_that_hooks_make_of_split_shards_are_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match=r"was taken out of its module|reads elements of"):
        fit_decoder(NormsWeights, scheme)


class SharesLayer(Decoder):
    def build(self) -> None:
        self.blocks[1].up = self.blocks[0].up  # type: ignore[union-attr]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", DECODER_SCHEMES)
def test_a_layer_of_two_blocks_trains_as_on_one_device(scheme: str) -> None:
    """A layer of two blocks was split with the one and not with the other."""
    assert_as_alone(SharesLayer, scheme)


class Lazy(Decoder):
    def build(self) -> None:
        self.head = nn.LazyLinear(VOCABULARY)

    def setup(self, stage: str) -> None:
        if isinstance(self.head.weight, nn.parameter.UninitializedParameter):
            values = torch.nn.Linear(8, VOCABULARY).double()
            self.head.load_state_dict(values.state_dict())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", ["zero3", "tensor", "2x2x2", "pipeline"])
def test_a_lazy_layer_is_refused_where_it_would_be_split(scheme: str) -> None:
    """A lazy layer became another class after it was split."""
    if scheme in ("tensor", "2x2x2"):
        with pytest.raises(ConfigError, match="becomes another class in its first forward"):
            fit_decoder(Lazy, scheme)
        return
    fit_decoder(Lazy, scheme)


class KeepsLogits(Decoder):
    """A running mean of logits, which are in parts."""

    def build(self) -> None:
        self.register_buffer("centre", torch.zeros(VOCABULARY))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.centre = 0.9 * self.centre + 0.1 * logits.detach().mean((0, 1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def test_a_buffer_of_split_logits_is_full_after_the_fit() -> None:
    """A buffer of split logits outlived its ranks."""
    assert_as_alone(KeepsLogits, "tensor")


def test_plans_split_a_shared_layer_alike_everywhere() -> None:
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    got = fit(SharesLayer, TensorParallelStrategy(backend="in_process", plan=plan), devices=2)
    torch.testing.assert_close(got.weights, fit(SharesLayer).weights, rtol=1e-9, atol=1e-9)
