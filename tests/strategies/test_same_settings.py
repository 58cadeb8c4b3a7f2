"""What ranks must have alike is compared before the first step, and named with both values."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard
from lightning_shard import AutoStrategy
from lightning_shard.backends.in_process.world import current_rank
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.trainer import same_on_ranks
from tests.processes import run_processes
from tests.strategies.parity import ignore_upstream_warnings, quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings(r"ignore:.*`isinstance\(treespec, LeafSpec\)` is deprecated"),
]
FEW: dict[str, Any] = {"max_steps": 4, "accumulate_grad_batches": 1}
DATA = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))


class Net(L.LightningModule):
    """Counts its steps; `change` is called with the module and the rank in one of its hooks."""

    def __init__(self, hook: str = "", change: Callable[[Any, int], Any] = lambda *_: None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.num_steps = 0
        self.hook, self.change = hook, change

    def changed_in(self, hook: str) -> None:
        if hook == self.hook:
            self.change(self, self.trainer.global_rank)

    def setup(self, stage: str) -> None:
        self.changed_in("setup")

    def on_train_start(self) -> None:
        self.changed_in("on_train_start")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 3:
            self.changed_in("on_train_batch_end")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.num_steps += 1
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        made: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, "step_size": 4, "interval": "epoch"}
        if self.hook == "configure_optimizers":
            made |= self.change(self, self.trainer.global_rank)
        groups = {name: made[name] for name in ("lr", "weight_decay")}
        optimizer = torch.optim.SGD(self.parameters(), **groups)
        if made["step_size"] is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, made["step_size"])
        made = {"scheduler": scheduler, "interval": made["interval"]}
        return {"optimizer": optimizer, "lr_scheduler": made}


def fit(module: Net, strategy: Any = "zero2_in_process", **options: Any) -> None:
    trainer = quiet_trainer(strategy=strategy, devices=2, **(FEW | options))
    trainer.fit(module, DataLoader(DATA, batch_size=2))


def options_of(rank: int, values: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: each[rank] for name, each in values.items()}


# --- within one process ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "values", "told"),
    [
        ("setup", {"accumulate_grad_batches": [1, 2]}, "Trainer(accumulate_grad_batches) is 1"),
        ("setup", {"gradient_clip_val": [None, 0.5]}, "Trainer(gradient_clip_val) is None"),
        ("on_train_start", {"gradient_clip_val": [0.1, 0.5]}, "Trainer(gradient_clip_val) is 0.1"),
        ("configure_optimizers", {"lr": [0.1, 0.2]}, "lr of group 0 of SGD is 0.1"),
        ("configure_optimizers", {"weight_decay": [0.0, 0.5]}, "weight_decay of group 0 of SGD"),
        ("configure_optimizers", {"step_size": [4, 3]}, "step_size of scheduler 0 is 4"),
        ("configure_optimizers", {"step_size": [4, None]}, "the schedulers is ['StepLR']"),
        (
            "configure_optimizers",
            {"interval": ["epoch", "step"]},
            "interval of scheduler 0 is epoch",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero3"])
def test_options_that_differ_are_told_before_the_first_step(
    hook: str, values: dict[str, list[Any]], told: str, strategy: str
) -> None:
    """Ranks trained on to other weights, or ended in a time-out."""

    def change(module: Net, rank: int) -> dict[str, Any]:
        mine = options_of(rank, values)
        if hook != "configure_optimizers":
            vars(module.trainer).update(mine)
        return mine

    module = Net(hook, change)
    with pytest.raises(ConfigError) as caught:
        fit(module, f"{strategy}_in_process", gradient_clip_val=None)
    other = next(iter(values.values()))[1]
    assert told in str(caught.value)
    expected = "[]" if other is None else other
    assert f" on rank 0 and {expected} on rank 1" in str(caught.value)
    assert module.num_steps == 0


@pytest.mark.parametrize("name", ["lightning_shard", "torch", "lightning"])
def test_versions_that_differ_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody compared them."""
    found = same_on_ranks.versions()

    def versions() -> dict[str, str]:
        return {**found, name: "0.0.1"} if current_rank() == 1 else found

    monkeypatch.setattr(same_on_ranks, "versions", versions)
    module = Net()
    with pytest.raises(ConfigError) as caught:
        fit(module)
    assert f"the version of {name} is {found[name]} on rank 0 and 0.0.1 on" in str(caught.value)
    assert module.num_steps == 0


def test_what_ranks_may_have_for_themselves_is_no_difference() -> None:
    """Loggers, progress, places and attributes of rank 0 alone."""

    def change(module: Net, rank: int) -> None:
        trainer: Any = module.trainer
        trainer.log_every_n_steps = 1 + rank
        if rank == 0:
            trainer.callbacks.append(L.Callback())

    module = Net("setup", change)
    fit(module)
    assert module.num_steps == 4


@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero2", "zero3", "elastic"])
def test_a_rate_that_comes_apart_in_mid_run_is_named(strategy: str) -> None:
    """Parts of one model trained at other rates without a word."""

    def change(module: Net, rank: int) -> None:
        module.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + rank)

    module = Net("on_train_batch_end", change)
    told = r"settings by step 4, .*lr of group 0 of SGD is 0\.1 on rank 0 and 0\.05 on rank 1"
    with pytest.raises(ConfigError, match=told):
        fit(module, f"{strategy}_in_process", max_steps=8)
    assert module.num_steps == 4


class ClipsByItsShare(Net):
    """Clips by a value that each rank has from its own samples."""

    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.algorithm = algorithm

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        value = 0.1 / (1 + self.trainer.global_rank)
        self.clip_gradients(optimizer, value, gradient_clip_algorithm=self.algorithm)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero3"])
def test_a_clip_value_that_a_call_gives_on_each_rank_is_named(
    strategy: str, algorithm: str
) -> None:
    """Parts of one model were clipped by other values without a word."""
    module = ClipsByItsShare(algorithm)
    told = r"settings by step 1, .*the last clip value is 0\.1 on rank 0 and 0\.05 on rank 1"
    with pytest.raises(ConfigError, match=told):
        fit(module, f"{strategy}_in_process", gradient_clip_val=None)
    assert module.num_steps == 1


def test_ranks_that_train_by_themselves_clip_by_values_of_their_own() -> None:
    fit(ClipsByItsShare("norm"), "local_sgd_in_process", gradient_clip_val=None)


@pytest.mark.parametrize("strategy", ["local_sgd", "async_sgd"])
def test_where_ranks_do_not_meet_in_steps_a_rate_is_compared_at_an_epochs_end(
    strategy: str,
) -> None:
    """Each trained on by its own."""

    def change(module: Net, rank: int) -> None:
        module.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + rank)

    with pytest.raises(ConfigError, match=r"lr of group 0 of SGD is 0\.1 on rank 0 and 0\.05"):
        fit(Net("on_train_batch_end", change), f"{strategy}_in_process", max_steps=8)


# --- processes ------------------------------------------------------------------------------------

DIFFERENT: dict[str, tuple[list[Any], str]] = {
    "strategy": (["zero1", "zero2"], "the strategy is ZeRO1Strategy on rank 0 and ZeRO2Strategy"),
    "bucket_mb": ([1, 2], "strategy(bucket_mb) is 1 on rank 0 and 2 on rank 1"),
    "precision": (
        ["32-true", "bf16-mixed"],
        "Trainer(precision) is 32-true on rank 0 and bf16-mix",
    ),
    "accumulate_grad_batches": ([1, 2], "Trainer(accumulate_grad_batches) is 1 on rank 0 and 2"),
    "max_steps": ([4, 6], "Trainer(max_steps) is 4 on rank 0 and 6 on rank 1"),
    "gradient_clip_val": ([0.5, 1.5], "Trainer(gradient_clip_val) is 0.5 on rank 0 and 1.5"),
    "lightning_shard": (
        ["1", "2"],
        "the version of lightning_shard is 1 on rank 0 and 2 on rank 1",
    ),
    "torch": (["1", "2"], "the version of torch is 1 on rank 0 and 2 on rank 1"),
    "lightning": (["1", "2"], "the version of lightning is 1 on rank 0 and 2 on rank 1"),
}
KINDS = {"zero1": lightning_shard.ZeRO1Strategy, "zero2": lightning_shard.ZeRO2Strategy}


def told_by_processes(rank: int, backend: str) -> dict[str, tuple[str, int]]:
    ignore_upstream_warnings()
    result = {}
    found = same_on_ranks.versions()
    for name, (values, _) in DIFFERENT.items():
        mine, module = {name: values[rank]}, Net()
        kind = KINDS[mine.pop("strategy", "zero1")]
        sizes = {"bucket_mb": mine.pop("bucket_mb", None)}
        versions = found | {one: mine.pop(one) for one in found if one in mine}
        same_on_ranks.versions = lambda versions=versions: versions
        try:
            fit(module, kind(backend=backend, **sizes), **mine)
        except ConfigError as error:
            result[name] = str(error), module.num_steps
    return result


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "shm"])
def test_processes_are_told_before_the_first_step(backend: str) -> None:
    """Class, bucket_mb and precision ended in a time-out or an abort, the rest went on."""
    for rank, told in enumerate(run_processes(in_process_of_rank, 2, backend=backend)):
        assert told.keys() == DIFFERENT.keys()
        for name, (text, num_steps) in told.items():
            assert text.startswith(f"Rank {rank}: ")
            assert DIFFERENT[name][1] in text
            assert num_steps == 0


def in_process_of_rank(backend: str) -> dict[str, tuple[str, int]]:
    return told_by_processes(int(os.environ["RANK"]), backend)


def other_backends() -> str:
    ignore_upstream_warnings()
    backend = ["gloo", "shm"][int(os.environ["RANK"])]
    try:
        fit(Net(), lightning_shard.ZeRO1Strategy(backend=backend))
    except ConfigError as error:
        return str(error)
    raise AssertionError("nobody has told")


@pytest.mark.slow
def test_other_backends_are_told_where_ranks_meet() -> None:
    """Each waited for the other in a transport of its own."""
    for text in run_processes(other_backends, 2):
        assert "it is gloo on rank 0 and shm on rank 1" in text


def with_seeds_of_their_own() -> tuple[list[int], list[str]]:
    ignore_upstream_warnings()
    L.seed_everything(42 + int(os.environ["RANK"]), verbose=False)
    module, seen = Net(), list[int]()
    data = TensorDataset(torch.arange(96.0)[:, None].expand(-1, 4))

    def note(_: Any, __: Any, batch: list[Tensor], *___: Any) -> None:
        seen.extend(batch[0][:, 0].int().tolist())

    callback = L.pytorch.callbacks.LambdaCallback(on_train_batch_start=note)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = quiet_trainer(
            strategy=lightning_shard.ZeRO1Strategy(backend="gloo"),
            devices=2,
            max_epochs=1,
            max_steps=-1,
            callbacks=[callback],
        )
        trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))
    return seen, [str(one.message) for one in told if "seeds" in str(one.message)]


@pytest.mark.slow
def test_seeds_of_their_own_give_no_sample_twice_and_are_told() -> None:
    """26 of 96 samples came twice, and as many never."""
    (first, told), (second, _) = run_processes(with_seeds_of_their_own, 2)
    assert sorted(first + second) == list(range(96))
    assert len(told) == 1
    assert "42 on rank 0, 43 on rank 1" in told[0]


def test_where_a_choice_is_written_is_each_ranks_own() -> None:
    """Rank 0 alone writes it, but another place on another host was refused."""
    told = same_on_ranks.started_with(AutoStrategy(choice_file="/scratch/of_this_host/choice.yaml"))
    assert not [name for name, one in told.items() if "of_this_host" in str(one)]
