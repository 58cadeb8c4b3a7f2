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
from tests.strategies.parity import ignoring, quiet_trainer
from tests.strategies.stacks import BATCH, Stack

pytestmark = ignoring(
    "You're resuming from a checkpoint that ended before",
    "Be aware that when using `ckpt_path`",
    "Using `DistributedSampler` with the dataloaders",
    ".*microbatches are fewer than the",
)

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
        plan={"blocks.*.layer": "colwise_gather_output"}, **IN_PROCESS
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
    state = model.state_dict()
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


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


def test_weights_of_the_average_that_do_not_fit(tmp_path: Path) -> None:
    model, _ = fresh()
    trainer = trainer_of("auto", callbacks=[WeightAveraging()])
    trainer.fit(model)
    # WeightAveraging gives its state to a file that is written while it trains
    saving = trainer_of(
        "auto", callbacks=[WeightAveraging(), SavesAt(1, tmp_path / "average.ckpt")]
    )
    saving.fit(fresh()[0])
    path = altered(
        tmp_path / "average.ckpt",
        tmp_path,
        lambda c: put(c["current_model_state"], "head.bias", lambda w: torch.zeros(4)),
    )
    model, before = fresh()
    with pytest.raises(CheckpointError, match=r"'head.bias' of current_model_state has shape"):
        resume("zero3", path, model, callbacks=[WeightAveraging()])
    assert_same(values_of(model), before)


class SavesAt(L.Callback):
    """Writes a file after a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def of_compression(checkpoint: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = checkpoint["lightning_shard"]["compression"]
    return kept


def of_rank(checkpoint: dict[str, Any], name: str) -> dict[str, Any]:
    kept: dict[str, Any] = checkpoint["lightning_shard"]["rank_1"][name]
    return kept


def of_local_sgd(checkpoint: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = checkpoint["lightning_shard"]["local_sgd"]
    return kept


KEPT: dict[str, tuple[Callable[[], Any], Callable[[dict[str, Any]], Any], str]] = {
    "an older checkpoint's residual": (
        lambda: ZeRO1Strategy(compression="topk", **IN_PROCESS),
        lambda c: of_compression(c).update(residual={"head.bias": torch.zeros(4)}),
        r"compression's residual of 'head.bias' has shape \(4,\), expected \(3,\)",
    ),
    "outer momentum": (
        lambda: STRATEGIES["local_sgd"](),
        lambda c: put(
            of_local_sgd(c)["outer"]["state"]["head.bias"],
            "momentum_buffer",
            lambda w: torch.zeros(4),
        ),
        r"the outer optimizer's momentum_buffer of 'head.bias' has shape \(4,\)",
    ),
    "local state": (
        lambda: STRATEGIES["local_sgd"](),
        lambda c: of_local_sgd(c).pop("arriving"),
        r"what local SGD keeps has no \['arriving'\]",
    ),
    "one rank's residual": (
        lambda: ZeRO1Strategy(compression="topk", **IN_PROCESS),
        lambda c: put(of_rank(c, "compression")["residual"], "head.bias", lambda w: w[:2]),
        r"rank_1's compression's residual of 'head.bias' has shape \(2,\), expected \(3,\)",
    ),
    "one rank's parameters": (
        lambda: STRATEGIES["local_sgd"](),
        lambda c: put(of_rank(c, "local_sgd")["parameters"], "head.bias", lambda w: w.int()),
        r"rank_1's own value of 'head.bias' is of torch.int32",
    ),
    "one rank's random streams": (
        lambda: ZeRO1Strategy(**IN_PROCESS),
        lambda c: put(of_rank(c, "random"), "torch", lambda state: state[:8]),
        r"rank_1's random streams: got \[\(8, torch.uint8\)",
    ),
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("case", KEPT)
def test_what_a_strategy_keeps_that_does_not_fit(case: str, tmp_path: Path) -> None:
    make, change, told = KEPT[case]
    trainer = trainer_of(make(), max_steps=4, callbacks=[SavesAt(3, tmp_path / "kept.ckpt")])
    trainer.fit(fresh()[0])
    model, before = fresh()
    trainer = trainer_of(make(), max_steps=5)
    with pytest.raises(CheckpointError, match=told):
        trainer.fit(
            model, ckpt_path=altered(tmp_path / "kept.ckpt", tmp_path, change), weights_only=False
        )
    assert_same(values_of(model), before)


class OnOneRank(Counted):
    """Loses a name on rank 1 alone."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_rank == 1:
            del checkpoint["state_dict"]["head.bias"]


def test_that_does_not_fit_on_one_rank(saved: Path) -> None:
    model, before = fresh(OnOneRank)
    with pytest.raises(CheckpointError, match=r'On rank 1: .*Missing key.*"head.bias"'):
        resume("zero2", saved, model)
    assert_same(values_of(model), before)


class WithHooks(Counted):
    """Loads what was saved under other names, and of other sizes, by hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.__dict__["_modules"].pop("embed")
        self.register_buffer("seen", torch.zeros(0))
        self.words: list[str] = []
        self.register_load_state_dict_pre_hook(self._rename)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith("embed.")]:
            state[name.replace("embed.", "first.")] = state.pop(name)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.seen = torch.zeros_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *args)

    def get_extra_state(self) -> Any:
        return {"words": self.words}

    def set_extra_state(self, state: Any) -> None:
        self.words.extend(state["words"])


def _with_extras(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"].update(seen=torch.arange(5.0), _extra_state={"words": ["a", "b"]})


@pytest.mark.parametrize("strategy", ["zero3", "tensor_parallel"])
def test_hooks_of_the_module_work(strategy: str, saved: Path, tmp_path: Path) -> None:
    path = altered(saved, tmp_path, _with_extras)
    alone, model = fresh(WithHooks)[0], fresh(WithHooks)[0]
    trainer_of("auto").validate(alone, ckpt_path=path, weights_only=False, verbose=False)
    trainer_of(STRATEGIES[strategy](), limit_val_batches=1).validate(
        model, ckpt_path=path, weights_only=False, verbose=False
    )
    assert model.words == alone.words == ["a", "b"]
    assert_same(values_of(model), values_of(alone))


def test_what_hooks_have_done_is_undone(saved: Path, tmp_path: Path) -> None:
    def change(checkpoint: dict[str, Any]) -> None:
        _with_extras(checkpoint)
        WEIGHTS["shape"][0](checkpoint)

    model, before = fresh(WithHooks)
    with pytest.raises(CheckpointError, match=r"'head.weight' has shape \(3, 4\)"):
        resume("zero3", altered(saved, tmp_path, change), model)
    assert model.words == []
    assert_same(values_of(model), before)


class Loose(Counted):
    """Takes what there is."""

    strict_loading = False


def _half_with_fewer_names(checkpoint: dict[str, Any]) -> None:
    weights = checkpoint["state_dict"]
    for name in list(weights):
        weights[name] = weights[name].bfloat16()
    del weights["head.bias"]
    weights["other"] = torch.ones(1)
    states = checkpoint["optimizer_states"][0]
    for entries in states["state"].values():
        entries["exp_avg"] = entries["exp_avg"].double()
    del states["state"][3]  # as of a parameter that was never used
    states["param_groups"][0]["params"] = list(range(100, 120))  # only their order matters
    states["state"] = {100 + number: entries for number, entries in states["state"].items()}


@pytest.mark.few_cases(4)
@everywhere
def test_what_loads_on_one_device_loads(strategy: str, saved: Path, tmp_path: Path) -> None:
    path = altered(saved, tmp_path, _half_with_fewer_names)
    (alone, _), (model, _) = fresh(Loose), fresh(Loose)
    after = Holds()
    expected = trainer_of("auto", max_steps=3, callbacks=[after])
    expected.fit(alone, ckpt_path=path, weights_only=False)
    got = resume(strategy, path, model, max_steps=3, callbacks=[holds := Holds()])
    torch.testing.assert_close(holds.weights, after.weights)
    if strategy != "elastic":
        state = got.strategy.optimizer_state(got.optimizers[0])["state"]
        assert {key: int(one["step"]) for key, one in state.items()} == {
            number: (1 if number == 3 else 3) for number in range(20)
        }


class Holds(L.Callback):
    """Keeps the full weights with which training starts."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.weights = {name: value.clone() for name, value in state.items()}
