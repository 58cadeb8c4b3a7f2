"""PowerSGD: what a spike, another compressor's checkpoint and odd shapes leave behind."""

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import DDPStrategy, ZeRO2Strategy
from lightning_shard.core.layout import build_layout
from lightning_shard.data_parallel.compression import Exchange, FlatBuffer, PowerSGD, TopK
from lightning_shard.data_parallel.compression.state import load_state, shared_by_all
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.testing import run_ranks
from tests.data_parallel.compression.buffers import (
    average,
    full,
    gradient,
    make_exchange,
    mean,
    state_of,
    world,
)
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()

Shapes = list[tuple[str, tuple[int, ...]]]
ENDS = [True, False]  # each rank keeps all, or its own segment


def exchange_of(shapes: Shapes, rank: int = 2) -> Exchange:
    """Each rank must call."""
    layout = build_layout(shapes, num_shards=1, align=4)
    return PowerSGD(rank=rank).exchange(FlatBuffer(layout=layout, ranks=world("in_process")))


def residual_of(exchange: Exchange) -> Tensor:
    """Shape (numel,): what is still to be sent, on average; each rank must call."""
    full = torch.zeros(exchange.buffer.numel)
    kept = state_of(exchange)["residual"]
    for name, view in exchange.buffer.views(full).items():
        if name in kept:
            view.copy_(kept[name])
    return full


@pytest.mark.parametrize("spike", [1e19, 1e22, 1e30])
def test_one_finite_spike_leaves_later_averages_finite(spike: float) -> None:
    """One finite spike made every later average NaN."""

    def fn(rank: int) -> None:
        exchange = make_exchange(PowerSGD(rank=2), keeps_all=True)
        for step in range(20):
            values = gradient(exchange.buffer, rank, step)
            got = average(exchange, values * (spike if step == 5 else 1e-2))
            assert got.isfinite().all(), step

    run_ranks(fn, 2)


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_the_scale_of_q_is_not_kept_from_step_to_step(scale: float) -> None:
    """Gradients of any scale give the same averages, in that scale, and the same q."""

    def fn(rank: int) -> None:
        plain, scaled = (make_exchange(PowerSGD(rank=2), keeps_all=True) for _ in range(2))
        for step in range(4):
            values = gradient(plain.buffer, rank, step)
            got = average(scaled, values * scale) / scale
            torch.testing.assert_close(got, average(plain, values), rtol=1e-3, atol=1e-4)
        for name, q in state_of(plain)["q"].items():
            torch.testing.assert_close(q.abs().amax(0), torch.ones(2))
            torch.testing.assert_close(state_of(scaled)["q"][name], q, rtol=1e-3, atol=1e-4)

    run_ranks(fn, 2)


def reference(values: list[list[Tensor]], q: Tensor) -> list[Tensor]:
    """Averages by Algorithm 1 and 2 of arXiv:1905.13727, q unscaled; values[step][rank]."""
    lost = [torch.zeros_like(one) for one in values[0]]
    averages = []
    for grads in values:
        matrices = [grad + left for grad, left in zip(grads, lost, strict=True)]
        total = torch.stack(matrices).mean(0)
        p = torch.linalg.qr(total @ q).Q
        q = total.T @ p
        lost = [matrix - p @ (p.T @ matrix) for matrix in matrices]
        averages.append(p @ q.T)
    return averages


def test_averages_are_those_of_the_paper() -> None:
    def fn(rank: int) -> None:
        exchange = exchange_of([("w", (24, 40))])
        q = torch.randn(40, 2, generator=torch.Generator().manual_seed(2))
        exchange.load({"q": {"w": q}}, 0)
        grads = [[gradient(exchange.buffer, r, step) for r in range(2)] for step in range(4)]
        matrices = [[grad.view(24, 40).double() for grad in step] for step in grads]
        for step, expected in zip(grads, reference(matrices, q.double()), strict=True):
            got = average(exchange, step[rank]).view(24, 40).double()
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)

    run_ranks(fn, 2)


def test_an_overflow_of_q_stays_in_neither_q_nor_residual() -> None:
    """P is finite, but the sums of M' P are not: each row is large, and all rows are alike."""

    def fn(rank: int) -> None:
        exchange = exchange_of([("w", (64, 8)), ("b", (3,))], rank=1)
        average(exchange, gradient(exchange.buffer, rank, 0))
        exchange.load({"q": {"w": torch.eye(8)[:, :1]}}, step=1)
        average(exchange, gradient(exchange.buffer, rank, 1) * 0)
        before, residual = state_of(exchange), residual_of(exchange)
        values = torch.zeros(exchange.buffer.numel)
        exchange.buffer.views(values)["w"][:, 0] = 1e38
        assert average(exchange, values).isnan().all()
        assert torch.equal(state_of(exchange)["q"]["w"], before["q"]["w"])
        assert torch.equal(residual_of(exchange), residual)
        assert average(exchange, gradient(exchange.buffer, rank, 2)).isfinite().all()

    run_ranks(fn, 2)


def test_one_ranks_overflow_of_what_is_lost_does_not_stay_in_its_residual() -> None:
    """Both averages are finite, since the ranks' values cancel; M - P Q' of each is not."""

    def fn(rank: int) -> None:
        exchange = exchange_of([("w", (3, 4))], rank=1)
        q = torch.eye(4)[:, :1]  # P is the first column, so that the second is free
        exchange.load({"q": {"w": q}}, step=0)
        values = torch.zeros(3, 4)
        values[:, 0] = 1.0
        values[:, 1] = torch.tensor([-2.8e38, 2.8e38, 2.8e38]) * (-1.0 if rank else 1.0)
        assert average(exchange, values.view(-1)).isnan().all()
        assert torch.equal(state_of(exchange)["q"]["w"], q)
        assert torch.equal(residual_of(exchange), torch.zeros(12))

    run_ranks(fn, 2)


def test_a_matrix_without_gradient_keeps_its_warm_start() -> None:
    def fn(rank: int) -> None:
        exchange = exchange_of([("w", (16, 16))])
        exchange.load({"q": {"w": gradient(exchange.buffer, 0, 0).view(16, 16)[:, :2]}}, 0)
        before = state_of(exchange)["q"]["w"]
        assert torch.equal(average(exchange, torch.zeros(256)), torch.zeros(256))
        assert torch.equal(state_of(exchange)["q"]["w"], before)

    run_ranks(fn, 2)


@pytest.mark.parametrize("keeps_all", ENDS)
def test_topks_residual_of_vectors_and_scalars_is_kept(keeps_all: bool) -> None:
    """It is in the state until it travels, once, whole, and on another number of ranks too."""

    def first(rank: int) -> object:
        settings = TopK(ratio=0.05)
        exchange = make_exchange(settings, keeps_all=True)
        for step in range(5):
            average(exchange, gradient(exchange.buffer, rank, step))
        return {**shared_by_all(settings, [exchange]), **state_of(exchange)}

    saved = run_ranks(first, 2)[0]
    assert isinstance(saved, dict)

    def second(rank: int) -> None:
        settings = PowerSGD(rank=2)
        exchange = make_exchange(settings, keeps_all=keeps_all)
        load_state(settings, [exchange], saved)
        again = state_of(exchange)["residual"]
        for name, residual in saved["residual"].items():
            torch.testing.assert_close(again[name], residual)
        buffer = exchange.buffer
        for step in range(2):
            got = buffer.views(full(exchange, average(exchange, gradient(buffer, rank, step))))
            for name, exact in buffer.views(mean(buffer, [step], 3)).items():
                if name in ("vector", "scalar"):
                    waited = saved["residual"][name] if step == 0 else 0.0
                    torch.testing.assert_close(got[name], exact + waited)
                    assert not state_of(exchange)["residual"][name].any()

    run_ranks(second, 3)


def test_a_residual_that_met_a_non_finite_average_waits_for_the_next() -> None:
    def fn(rank: int) -> None:
        exchange = make_exchange(PowerSGD(rank=2), keeps_all=True)
        exchange.load({"residual": {"vector": torch.arange(7.0)}}, step=0)
        bad = torch.full((exchange.buffer.numel,), torch.nan)
        assert average(exchange, bad).isnan().all()
        assert torch.equal(state_of(exchange)["residual"]["vector"], torch.arange(7.0))
        got = average(exchange, torch.zeros(exchange.buffer.numel))
        torch.testing.assert_close(exchange.buffer.views(got)["vector"], torch.arange(7.0))

    run_ranks(fn, 2)


def test_a_residual_waits_for_the_end_of_a_warm_up() -> None:
    def fn(rank: int) -> None:
        exchange = make_exchange(PowerSGD(warmup_steps=1), keeps_all=True)
        exchange.load({"residual": {"vector": torch.arange(7.0)}}, step=0)
        assert exchange.passes(torch.zeros(exchange.buffer.numel))
        assert torch.equal(state_of(exchange)["residual"]["vector"], torch.arange(7.0))
        assert not exchange.passes(torch.zeros(exchange.buffer.numel))

    run_ranks(fn, 2)


def test_what_no_rank_uses_stays_in_the_residual() -> None:
    """An optimizer passes over it, so it must wait; what one rank uses goes with all ranks'."""

    def fn(rank: int) -> None:
        exchange = make_exchange(PowerSGD(rank=2), keeps_all=True)
        buffer = exchange.buffer
        average(exchange, gradient(buffer, rank, 0))
        exchange.load({**state_of(exchange), "residual": buffer.views(gradient(buffer, 0, 1))}, 1)
        before, q = buffer.views(residual_of(exchange)), state_of(exchange)["q"]
        names = [slot.name for slot in buffer.layout.slots]
        used = [name == "cube" and rank == 1 for name in names]
        values, out = torch.ones(buffer.numel), torch.empty(buffer.numel)
        exchange.begin(values, out, used)
        exchange.wait()
        got, after = buffer.views(out), buffer.views(residual_of(exchange))
        for name in ("matrix", "vector", "scalar"):
            assert not got[name].any()
            torch.testing.assert_close(after[name], before[name])
        assert torch.equal(state_of(exchange)["q"]["matrix"], q["matrix"])
        torch.testing.assert_close(got["cube"] + after["cube"], before["cube"] + 0.5)

    run_ranks(fn, 2)


class Tied(L.LightningModule):
    """One matrix under two names; its gradient is the same in each step."""

    slope: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24, bias=False)
        self.second = nn.Linear(24, 24, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("slope", torch.randn(24, 24))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self.first.weight * self.slope).sum() + (self.second.weight * self.slope).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("strategy", [DDPStrategy, ZeRO2Strategy])
def test_tied_weights_have_one_residual_and_lose_nothing(
    strategy: type[DataParallelStrategy],
) -> None:
    torch.manual_seed(0)
    model = Tied()
    before, states = model.first.weight.detach().clone(), []

    class Look(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            assert isinstance(trainer.strategy, DataParallelStrategy)
            (exchange,) = trainer.strategy.engine.exchanges
            states.append(state_of(exchange)["residual"])

    made = strategy(backend="in_process", compression=PowerSGD(rank=1))
    plain = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    trainer = quiet_trainer(strategy=made, devices=2, max_steps=6, callbacks=[Look()], **plain)
    trainer.fit(model, DataLoader(TensorDataset(torch.zeros(12))))
    assert model.second.weight is model.first.weight
    residual = states[0]
    assert residual.keys() == {"first.weight"}
    moved = before - model.first.weight.detach()
    torch.testing.assert_close(moved + residual["first.weight"], 12 * model.slope)


ODD: Shapes = [
    ("wide", (3, 500)),
    ("tall", (500, 2)),
    ("row", (1, 64)),
    ("conv", (8, 4, 3, 3)),
    ("depthwise", (32, 1, 5, 5)),
    ("empty", (0, 4)),
    ("scalar", ()),
]


@pytest.mark.parametrize("rank_of_approximation", [1, 2, 4, 64])
def test_any_rank_and_shape_conserves_the_gradients(rank_of_approximation: int) -> None:
    def fn(rank: int) -> None:
        exchange = exchange_of(ODD, rank_of_approximation)
        buffer = exchange.buffer
        sent = sum(average(exchange, gradient(buffer, rank, step)) for step in range(5))
        exact = mean(buffer, range(5), 2)
        torch.testing.assert_close(sent + residual_of(exchange), exact, rtol=1e-4, atol=1e-4)

    run_ranks(fn, 2)


@pytest.mark.parametrize(
    ("rank_of_approximation", "factored"),
    [
        (1, {"wide": (500, 1), "tall": (2, 1), "conv": (36, 1), "depthwise": (25, 1)}),
        (2, {"wide": (500, 2), "conv": (36, 2), "depthwise": (25, 2)}),
        (4, {"conv": (36, 4), "depthwise": (25, 4)}),
        (64, {}),
    ],
)
def test_what_is_factored(rank_of_approximation: int, factored: dict[str, tuple[int, int]]) -> None:
    """Only what gains: never at a rank as large as a side; rows are the first dimension."""

    def fn(rank: int) -> dict[str, tuple[int, ...]]:
        exchange = exchange_of(ODD, rank_of_approximation)
        average(exchange, gradient(exchange.buffer, rank, 0))
        return {name: tuple(q.shape) for name, q in state_of(exchange)["q"].items()}

    assert run_ranks(fn, 1)[0] == factored


def test_a_convolution_is_the_matrix_of_its_output_channels() -> None:
    def fn(rank: int) -> None:
        conv, matrix = exchange_of([("w", (8, 4, 3, 3))]), exchange_of([("w", (8, 36))])
        for step in range(3):
            values = gradient(conv.buffer, rank, step)
            assert torch.equal(average(conv, values), average(matrix, values))

    run_ranks(fn, 2)
