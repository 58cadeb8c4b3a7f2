"""Weights of layers in float8 that travel in 8 bits: what the layers compute is the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.backends.traffic import OperationTraffic
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks
from tests.data_parallel.compression.test_quantized_gather import masters, step_of
from tests.groups import engine_of

_STEPS, _WIDTH = 4, 9  # ranks' shards end within rows


class _Rounds(torch.autograd.Function):
    """Rounds a weight as torchao's layers do."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, by_rows: bool) -> Tensor:
        greatest = weight.abs().amax(1, keepdim=True) if by_rows else weight.abs().max()
        scale = (448 / greatest.double().clamp(min=1e-12)).float()
        if by_rows:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        codes = (weight.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (codes.float() / scale).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Float8(nn.Linear):
    """A layer that is known by what torchao's have."""

    def __init__(
        self, width: int, *, by_rows: bool = False, later: int = _WIDTH, bias: bool = True
    ) -> None:
        super().__init__(width, later, bias)
        cast = SimpleNamespace(
            scaling_type=SimpleNamespace(value="dynamic"),
            scaling_granularity=SimpleNamespace(value="axiswise" if by_rows else "tensorwise"),
            target_dtype=torch.float8_e4m3fn,
        )
        self.config = SimpleNamespace(
            cast_config_weight=cast,
            cast_config_weight_for_grad_input=cast,
            round_scales_to_power_of_2=by_rows,
        )
        self.by_rows, self.used = by_rows, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        weight = _Rounds.apply(self.weight, self.by_rows)
        self.used.append(weight.detach().clone())
        return nn.functional.linear(x, weight, self.bias)


def network(by_rows: bool) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(Float8(_WIDTH, by_rows=by_rows), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *blocks, nn.Linear(_WIDTH, 1))


class Loss(nn.Module):
    def __init__(self, by_rows: bool) -> None:
        super().__init__()
        self.net = network(by_rows)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean()
        return loss


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(
    num_ranks: int, by_rows: bool, edit: Any = None, **options: Any
) -> list[tuple[list[float], dict[str, Tensor], list[Tensor]]]:
    """Return by rank the losses, the masters and what layers have computed with."""

    def fn(rank: int) -> Any:
        engine = engine_of(Loss(by_rows), stage=3, bucket_mb=1e-9, **options)
        adam, losses = torch.optim.Adam(engine.model.parameters(), 0.05), []
        for step in range(_STEPS):
            losses.append(float(step_of(engine, adam, batch(step, rank))))
            if edit is not None:
                with torch.no_grad(), engine.hook():
                    edit(engine.model)
        layers = [one for one in engine.model.modules() if isinstance(one, Float8)]
        return losses, masters(engine), [used for one in layers for used in one.used]

    return [one for one in run_ranks(fn, num_ranks) if one is not None]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_layers_compute_the_same_bits(num_ranks: int, by_rows: bool) -> None:
    dense = trained(num_ranks, by_rows)
    torch.testing.assert_close(
        trained(num_ranks, by_rows, gather_dtype="float8"), dense, rtol=0, atol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("by_rows", [False, True])
def test_scales_follow_what_a_hook_has_written(by_rows: bool) -> None:
    """An update's scales would cut off what has become greater since, or round the rest less."""

    def edit(model: nn.Module) -> None:
        for param in model.parameters():
            param.mul_(1.7)

    dense = trained(2, by_rows, edit)
    torch.testing.assert_close(
        trained(2, by_rows, edit, gather_dtype="float8"), dense, rtol=0, atol=0
    )


def test_the_scales_of_a_step_take_one_reduction_and_weights_a_quarter_of_the_bytes() -> None:
    def sent(**options: Any) -> tuple[int, OperationTraffic]:
        def fn(rank: int) -> tuple[int, OperationTraffic]:
            model = nn.Sequential(*(Float8(64, later=64, bias=False) for _ in range(3)))
            engine = engine_of(model, stage=3, bucket_mb=1e-9, **options)
            with engine.step():
                model(torch.ones(2, 64))
            counted = engine.collectives.traffic
            gathers, reductions = counted["all_gather"], counted["all_reduce"]
            with engine.step():
                loss = model(torch.ones(2, 64)).sum()
            with engine.backward():
                loss.backward()
            return (counted["all_gather"] - gathers).bytes, counted["all_reduce"] - reductions

        return run_ranks(fn, 2)[0] or (0, OperationTraffic())

    (dense, others), (gathered, reductions) = sent(), sent(gather_dtype="float8")
    num_gathers, rest = divmod(dense, 64 * 64 // 2 * 4)
    assert num_gathers >= 5
    assert rest == 0
    assert gathered == num_gathers * (64 * 64 // 2 + 8)
    assert reductions.calls == others.calls + 1
    assert reductions.bytes == others.bytes + 3 * 4


def test_a_weight_that_another_layer_uses_travels_as_it_is() -> None:
    def fn(rank: int) -> list[Tensor]:
        model = Loss(by_rows=False)
        model.net[0].weight = model.net[1][0].weight
        engine, seen = engine_of(model, stage=3, bucket_mb=1e-9, gather_dtype="float8"), []

        def note(module: nn.Module, *_: object) -> None:
            seen.append(module.weight.detach().clone())

        for one in (model.net[0], model.net[2][0]):
            one.register_forward_pre_hook(note)
        with engine.step(), torch.no_grad():
            model(batch(0, rank))
        exact = masters(engine)
        return [*seen, exact["net.0.weight"], exact["net.2.0.weight"]]

    tied, rounded, exact_tied, exact = run_ranks(fn, 2)[0] or ()
    assert torch.equal(tied, exact_tied)
    assert not torch.equal(rounded, exact)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 0}, "gather none"),
        ({"stage": 2}, "full weights at all times"),
        ({"stage": 3, "offload": "parameters"}, "host memory"),
        ({"stage": 3, "same_bits": True}, "same_bits"),
    ],
)
def test_what_could_not_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(gather_dtype="float8", **options)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="gathers weights of layers in float8, got a Linear"):
        run_ranks(lambda _: engine_of(nn.Linear(2, 2), stage=3, gather_dtype="float8"), 2)
