"""A checkpoint that does not fit is refused by name on every rank, and leaves no trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import (
    AsyncSGDStrategy,
    DDPStrategy,
    ElasticStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.errors import CheckpointError
from tests.strategies.parity import UPSTREAM_WARNINGS, quiet_trainer
from tests.strategies.stacks import BATCH, Stack

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*microbatches are fewer than the"),
]

IN_PROCESS = {"backend": "in_process", "num_ranks": 2}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "shard_ddp": lambda: DDPStrategy(**IN_PROCESS),
    "zero1": lambda: ZeRO1Strategy(**IN_PROCESS),
    "zero2": lambda: ZeRO2Strategy(**IN_PROCESS),
    "zero3": lambda: ZeRO3Strategy(**IN_PROCESS),
    "local_sgd": lambda: LocalSGDStrategy(sync_every=2, outer_optimizer="nesterov", **IN_PROCESS),
    "async_sgd": lambda: AsyncSGDStrategy(staleness_bound=1, **IN_PROCESS),
    "elastic": lambda: ElasticStrategy(**IN_PROCESS),
    "tensor_parallel": lambda: TensorParallelStrategy(
        plan={"blocks.*.layer": "colwise"}, **IN_PROCESS
    ),
    "pipeline_parallel": lambda: PipelineParallelStrategy(num_microbatches=2, **IN_PROCESS),
    "hybrid_parallel": lambda: HybridParallelStrategy(
        pipeline_parallel_size=2, num_microbatches=2, zero_stage=2, backend="in_process",
        num_ranks=4,
    ),
}  # fmt: skip
everywhere = pytest.mark.parametrize("strategy", STRATEGIES)
OF_EVERY_ENGINE = ["zero3", "shard_ddp", "local_sgd", "hybrid_parallel"]


class Counted(Stack):
    """A stack with a buffer, under Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset(), batch_size=BATCH)

    test_dataloader = val_dataloader


def trainer_of(strategy: Any, **options: Any) -> L.Trainer:
    defaults = {
        "max_steps": 2,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "limit_val_batches": 0,
    }
    return quiet_trainer(strategy=strategy, **(defaults | options))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a single device after two steps."""
    path = tmp_path_factory.mktemp("saved") / "good.ckpt"
    torch.manual_seed(0)
    trainer = trainer_of("auto")
    trainer.fit(Counted())
    trainer.save_checkpoint(path)
    return path


def altered(saved: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    checkpoint = torch.load(saved, weights_only=False)
    change(checkpoint)
    torch.save(checkpoint, folder / "altered.ckpt")
    return folder / "altered.ckpt"


def fresh(style: type[Counted] = Counted) -> tuple[Counted, dict[str, Tensor]]:
    torch.manual_seed(7)
    model = style()
    return model, values_of(model)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def resume(strategy: str, path: Path, model: Counted, **options: Any) -> L.Trainer:
    trainer = trainer_of(STRATEGIES[strategy](), **({"max_steps": 4} | options))
    trainer.fit(model, ckpt_path=path, weights_only=False)
    return trainer


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def state_of(checkpoint: dict[str, Any], param: int = 2) -> dict[str, Any]:
    """Return the entries of a parameter; 2 is blocks.0.norm.weight, of shape (8,)."""
    entries: dict[str, Any] = checkpoint["optimizer_states"][0]["state"][param]
    return entries


def put(mapping: dict[str, Any], key: Any, change: Callable[[Any], Any]) -> None:
    mapping[key] = change(mapping[key])


# What is done to a checkpoint, and what the error says of it.
WEIGHTS = {
    "shape": (
        lambda c: put(c["state_dict"], "head.weight", lambda w: torch.zeros(3, 4)),
        r"'head.weight' has shape \(3, 4\), expected \(3, 8\)",
    ),
    "buffer's shape": (
        lambda c: put(c["state_dict"], "scale", lambda w: torch.ones(4)),
        r"'scale' has shape \(4,\), expected \(3,\)",
    ),
    "integers": (
        lambda c: put(c["state_dict"], "blocks.1.layer.bias", lambda w: w.long()),
        r"'blocks.1.layer.bias' is of torch.int64, expected floating-point numbers",
    ),
    "complex": (
        lambda c: put(c["state_dict"], "scale", lambda w: w.to(torch.complex64)),
        r"'scale' is of torch.complex64, expected floating-point",
    ),
    "missing": (lambda c: c["state_dict"].pop("head.bias"), 'Missing key.*"head.bias"'),
    "stranger": (lambda c: c["state_dict"].update(other=torch.ones(1)), 'Unexpected key.*"other"'),
}
STATES = {
    "shape": (
        lambda c: put(state_of(c), "exp_avg", lambda w: torch.zeros(16)),
        r"'exp_avg' of 'blocks.0.norm.weight' in the state of Adam has shape \(16,\), expected",
    ),
    "other shape of as many": (
        lambda c: put(state_of(c, 0), "exp_avg_sq", lambda w: w.T.contiguous()),
        r"'exp_avg_sq' of 'embed.weight' .* has shape \(4, 8\), expected \(8, 4\)",
    ),
    "integers": (
        lambda c: put(state_of(c), "exp_avg", lambda w: w.long()),
        r"'exp_avg' of 'blocks.0.norm.weight' .* is of torch.int64",
    ),
    "entry": (
        lambda c: state_of(c).pop("exp_avg_sq"),
        r"entries of 'blocks.0.norm.weight' .* expected \['exp_avg_sq'\], too",
    ),
    "counter": (
        lambda c: put(state_of(c), "step", lambda w: torch.zeros(2)),
        r"'step' of 'blocks.0.norm.weight' .* has shape \(2,\)",
    ),
    "not a tensor": (
        lambda c: put(state_of(c), "exp_avg", lambda w: "gone"),
        r"'exp_avg' of 'blocks.0.norm.weight' .* is a str, expected a tensor",
    ),
    "parameter": (
        lambda c: c["optimizer_states"][0]["state"].update({99: {}}),
        r"entries for \[99\], which no group lists",
    ),
    "option": (
        lambda c: c["optimizer_states"][0]["param_groups"][0].pop("betas"),
        r"a group of Adam has the options .*, expected 'betas', too",
    ),
    "fewer parameters": (
        lambda c: c["optimizer_states"][0]["param_groups"][0]["params"].pop(),
        r"groups of \[19\] parameters, expected \[20\]",
    ),
    "fewer optimizers": (
        lambda c: c["optimizer_states"].clear(),
        r"the state of 0 optimizers, expected 1",
    ),
}


@everywhere
@pytest.mark.parametrize("kind", ["weights", "state"])
def test_of_another_shape_leaves_no_trace(
    strategy: str, kind: str, saved: Path, tmp_path: Path
) -> None:
    change, told = {"weights": WEIGHTS, "state": STATES}[kind]["shape"]
    model, before = fresh()
    with pytest.raises(CheckpointError, match=told):
        resume(strategy, altered(saved, tmp_path, change), model)
    assert_same(values_of(model), before)


@pytest.mark.parametrize("case", WEIGHTS)
@pytest.mark.parametrize("strategy", ["zero3", "pipeline_parallel"])
def test_weights_that_do_not_fit(strategy: str, case: str, saved: Path, tmp_path: Path) -> None:
    change, told = WEIGHTS[case]
    path = altered(saved, tmp_path, change)
    model, before = fresh()
    for verb in ("fit", "validate", "test"):
        trainer = trainer_of(STRATEGIES[strategy](), limit_val_batches=1)
        with pytest.raises(CheckpointError, match=told):
            getattr(trainer, verb)(model, ckpt_path=path, weights_only=False)
        assert_same(values_of(model), before)


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("strategy", OF_EVERY_ENGINE)
def test_state_that_does_not_fit(strategy: str, case: str, saved: Path, tmp_path: Path) -> None:
    change, told = STATES[case]
    model, before = fresh()
    with pytest.raises(CheckpointError, match=told):
        resume(strategy, altered(saved, tmp_path, change), model)
    assert_same(values_of(model), before)
