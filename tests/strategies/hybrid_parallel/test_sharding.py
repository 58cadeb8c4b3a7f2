"""Copies of the state, each in shards on a node's ranks: the same training, and less to gather."""

import warnings
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_shard import HybridParallelStrategy
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.errors import ConfigError
from lightning_shard.planning.report import DryRun
from lightning_shard.strategies.groups import (
    replicate_ranks,
    shard_ranks,
    shard_size,
    warning_of_unshards,
)
from tests.checkpoint.scheme_files import (
    assert_goes_on,
    assert_same,
    build_double,
    load,
    saving,
    trainer_of,
)
from tests.precision.test_plugins import Overflowing, Scales
from tests.processes import run_processes
from tests.strategies.data_parallel.test_held_bytes_and_traffic import BYTES_PER_PARAMETER, PADDING
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    Case,
    GlobalBatches,
    Run,
    assert_bitwise_equal,
    assert_parity,
    build,
    ignore_upstream_warnings,
    ignoring,
    quiet_trainer,
    single_device,
    train,
)

pytestmark = ignoring(
    # The resumed runs write no checkpoints of their own.
    "Be aware that when using `ckpt_path`"
)

STAGES = ("shard_ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: copies of the state and ranks of each, and how the model itself is split."""

    model: str = "gpt"
    size: int | tuple[int, int] = (2, 2)
    zero_stage: int
    pp: int = 1
    tp: int = 1
    num_ranks: int = 4
    precision: Any = "32-true"

    def __str__(self) -> str:
        return f"{self.model}-{self.size}-stage{self.zero_stage}-pp{self.pp}-tp{self.tp}"

    def trainer(self, model: str, **options: Any) -> L.Trainer:
        return trainer_of(self.strategy(), self.num_ranks, **options)

    def strategy(self, backend: str = "in_process") -> HybridParallelStrategy:
        return HybridParallelStrategy(
            backend=backend,
            pipeline_parallel_size=self.pp,
            tensor_parallel_size=self.tp,
            data_parallel_size=self.size,
            zero_stage=self.zero_stage,
            num_microbatches=3,
            bucket_mb=SMALL_BUCKET_MB,
        )


def train_layout(layout: Layout, backend: str = "in_process") -> Run:
    """Train as a layout says; on real processes each must call."""
    ignore_upstream_warnings()
    return train(
        build(layout.model),
        strategy=layout.strategy(backend),
        devices=layout.num_ranks,
        precision=layout.precision,
    )


def assert_single_device(run: Run, layout: Layout) -> None:
    assert_parity(run, single_device(Case(model=layout.model, strategy="", num_ranks=4)))


QUICK = [
    Layout(zero_stage=1, model="mixture"),
    Layout(zero_stage=2, model="lstm"),
    Layout(zero_stage=3),
]
ALL = [
    *(
        Layout(model=model, zero_stage=stage)
        for model, stage in product(("gpt", "lstm", "mixture", "conv"), range(4))
    ),
    *(Layout(size=size, zero_stage=stage) for size in ((4, 1), (1, 4)) for stage in (1, 2, 3)),
    *(Layout(zero_stage=stage, tp=2, num_ranks=8) for stage in (1, 2, 3)),
    *(Layout(zero_stage=stage, pp=2, num_ranks=8) for stage in (1, 2, 3)),
]


@pytest.mark.few_cases(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in ALL if one not in QUICK)],
    ids=str,
)
def test_parity(layout: Layout) -> None:
    assert_single_device(train_layout(layout), layout)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_gloo_processes() -> None:
    layout = Layout(zero_stage=3)
    for run in run_processes(train_layout, 4, timeout_seconds=500, layout=layout, backend="gloo"):
        assert_single_device(run, layout)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits() -> None:
    layout = Layout(zero_stage=2)
    assert_bitwise_equal(train_layout(layout), train_layout(layout))


@dataclass
class Census(L.Callback):
    """After the fit rank 0's copy has the figures of all ranks.

    Attributes:
        sent: Elements that each rank sends in a step but the first, by group and operation.
    """

    held: list[HeldBytes] = field(default_factory=list)
    sent: list[dict[tuple[str, str], int]] = field(default_factory=list)
    shards: list[Tensor] = field(default_factory=list)
    _held: HeldBytes | None = None

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self._held = trainer.strategy.held_bytes()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            for group in ("shard", "replicate"):
                getattr(trainer.strategy.gradient_groups, group).traffic.reset()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        sent = {
            (group, operation): total.elements // (trainer.global_step - 1)
            for group in ("shard", "replicate")
            for operation, total in getattr(strategy.gradient_groups, group).traffic.items()
        }
        shards = torch.cat([flat.shard for flat in strategy.engine.flats])
        dp = strategy.collectives.all_gather_object((self._held, sent, shards))
        self.held, self.sent, self.shards = (list(one) for one in zip(*dp, strict=True))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_holds_and_gathers_what_one_of_its_copy_does(stage: int) -> None:
    model, census = ExampleGPT(), Census()
    trainer = quiet_trainer(
        strategy=Layout(zero_stage=stage).strategy(),
        devices=4,
        callbacks=[census],
        max_steps=4,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
    )
    trainer.fit(model, datamodule=GlobalBatches(model, num_steps=4))
    num_params = sum(param.numel() for param in model.parameters())
    bytes_each = [full + shared / 2 for full, shared in BYTES_PER_PARAMETER[STAGES[stage]]]
    padded = 2 * census.shards[0].numel()
    assert padded == pytest.approx(num_params, rel=PADDING)
    for held, sent in zip(census.held, census.sent, strict=True):
        got = [held.parameters, held.gradients, held.optimizer_state]
        assert got == pytest.approx([each * num_params for each in bytes_each], rel=PADDING)
        assert sent["shard", "reduce_scatter"] == padded // 2
        assert sent["replicate", "all_reduce"] == padded // 2  # twice half of half
        assert {operation for group, operation in sent if group == "replicate"} == {"all_reduce"}
    for first, copy in zip(census.shards[:2], census.shards[2:], strict=True):
        assert torch.equal(first, copy)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_in_one_copy_skips_the_step_everywhere(stage: int) -> None:
    torch.manual_seed(7)
    model, scales = Overflowing(fused=False), Scales()
    trainer = quiet_trainer(
        strategy=Layout(zero_stage=stage).strategy(),
        devices=4,
        plugins=[MixedPrecision("16-mixed", device="cpu")],
        max_steps=3,
        limit_train_batches=3,
        accumulate_grad_batches=1,
        callbacks=[scales],
    )
    trainer.fit(model, datamodule=GlobalBatches(model, 3))
    assert scales.scales == [[32768.0] * 4] * 3  # half of the first one
    assert scales.updates == [[0.0] * 4, [1.0] * 4, [2.0] * 4]


@dataclass(frozen=True)
class OneDevice:
    """Plain Lightning."""

    def trainer(self, model: str, **options: Any) -> L.Trainer:
        return trainer_of("auto", 1, **options)


ZERO2_OF_THREE = Layout(size=3, num_ranks=3, zero_stage=2)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout(zero_stage=3), ZERO2_OF_THREE),
        (ZERO2_OF_THREE, Layout(zero_stage=3)),
        (Layout(zero_stage=1), OneDevice()),
        (OneDevice(), Layout(zero_stage=2)),
    ],
    ids=str,
)
def test_resume(before: Any, after: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    saved = saving(tmp_path_factory)
    full, file = saved("mixture", OneDevice()), saved("mixture", before)
    assert_same(load(file.afterwards), load(full.afterwards))
    assert_goes_on(build_double("mixture"), "mixture", file.first_epoch, after, full)


# --- sizes -----------------------------------------------------------------------------------


def test_the_ranks_of_a_copy_are_neighbours() -> None:
    ranks = tuple(range(0, 16, 2))  # of tp=2
    assert [shard_ranks(ranks, rank, 4) for rank in (0, 6, 8)] == [
        (0, 2, 4, 6),
        (0, 2, 4, 6),
        (8, 10, 12, 14),
    ]
    assert [replicate_ranks(ranks, rank, 4) for rank in (0, 6, 8)] == [(0, 8), (6, 14), (0, 8)]


@given(num_copies=st.integers(1, 8), size=st.integers(1, 8), step=st.integers(1, 3))
def test_every_rank_shares_one_rank_with_each_pair_of_groups(
    num_copies: int, size: int, step: int
) -> None:
    ranks = range(0, num_copies * size * step, step)
    for one, other in product(ranks, ranks):
        shared = {*shard_ranks(ranks, one, size)} & {*replicate_ranks(ranks, other, size)}
        assert len(shared) == 1
    assert all(len(replicate_ranks(ranks, rank, size)) == num_copies for rank in ranks)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(-1, 12), (12, 12), ((3, 4), 4), ((-1, 4), 4), ((3, -1), 4), ((1, -1), 12), ((12, 1), 1)],
)
def test_the_ranks_of_a_copy(size: Any, expected: int) -> None:
    assert shard_size(size, 12) == expected


@pytest.mark.parametrize("size", [(2, 4), (5, -1), (-1, 5), (3, 3), (24, -1), (-1, 24)])
def test_a_pair_that_does_not_fit_is_refused_with_pairs_that_do(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"multiply to the 12 data-parallel ranks .* do: \(\d"):
        shard_size(size, 12)


def test_the_proposals_are_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"that do: \(3, 4\), \(2, 6\), \(4, 3\)\.$"):
        shard_size((2, 5), 12)


@pytest.mark.parametrize("size", [(2, 2, 2), (0, 4), (-1, -1), (2, -2), (4,)])
def test_what_is_no_pair_is_refused_before_any_rank_starts(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be .* \(replicate and shard\)"):
        HybridParallelStrategy(backend="in_process", data_parallel_size=size)


def test_a_pair_of_another_size_than_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(2, 3\) does not multiply to the 4 data-parallel"):
        train_layout(Layout(size=(2, 3), zero_stage=1))


def test_copies_across_nodes_are_warned_of() -> None:
    mesh = ParallelMesh(dp=8, tp=2)
    assert warning_of_unshards(mesh, 4, ranks_per_node=8) is None
    warning = warning_of_unshards(mesh, 8, ranks_per_node=8)
    assert warning is not None
    assert "over 8 ranks cross nodes of 8 ranks" in warning
    assert "data_parallel_size=(2, 4) keeps them inside" in warning


@pytest.mark.slow
def test_a_dry_run_tells_of_copies_across_nodes() -> None:
    """A dry run did not tell of copies across nodes."""

    def dry(zero_stage: int) -> DryRun:
        strategy = Layout(size=(2, 8), zero_stage=zero_stage).strategy()
        model = build("gpt")
        batch = model.data(6).tensors  # type: ignore[attr-defined]
        return strategy.dry_run(model, batch, world_size=16, ranks_per_node=4)

    told = dry(1)
    assert told.mesh == ParallelMesh(dp=16, shard=8)
    assert "Copies of the state over 8 ranks cross nodes of 4 ranks" in str(told)
    assert dry(0).mesh == ParallelMesh(dp=16)  # nothing is gathered
    assert dry(0).placement.warnings == ()


def test_a_pair_comes_from_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(HybridParallelStrategy, "strategy")
    for text, expected in [("[2, 4]", (2, 4)), ("[-1, 8]", (-1, 8)), ("-1", -1), ("4", 4)]:
        config = parser.parse_args([f"--strategy.data_parallel_size={text}"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strategy = parser.instantiate_classes(config).strategy
        assert strategy.data_parallel_size == expected
