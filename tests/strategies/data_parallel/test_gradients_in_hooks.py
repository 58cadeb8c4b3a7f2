"""What user code reads of `.grad` in its hooks is the full model's, the same on every rank."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_shard import CollectiveMismatchError, ConfigError, DDPStrategy
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import GlobalBatches, ignoring
from tests.strategies.trainer.test_weight_averaging import SCHEMES as AVERAGED
from tests.strategies.trainer.test_weight_averaging import SINGLE, Scheme, hybrid

pytestmark = ignoring(".*microbatches are fewer than the")
SCHEMES = {name: AVERAGED[name] for name in ("zero1", "zero2", "zero3", "tensor", "pipeline")} | {
    "shard_ddp": Scheme(num_ranks=2, make=DDPStrategy),
    "2x2x1 stage 1": hybrid(2, 2, 1, 1),
    "tensor stage 2": hybrid(1, 2, 2, 2),
}
QUICK_SCHEMES = ("zero2", "zero3", "tensor", "2x2x1 stage 1")
SLOW_SCHEMES = {
    name: AVERAGED[name]
    for name in ("2x2x2 stage 0", "2x2x2 stage 2", "2x2x2 stage 3", "two copies", "pipeline zbv")
}
MANY = [
    pytest.param(name, marks=() if name in QUICK_SCHEMES else pytest.mark.slow)
    for name in (*SCHEMES, *SLOW_SCHEMES)
]
NUM_STEPS = 2
LOOKED_AT = ("byte_embedding.weight", "1.up.weight", "1.up.bias", "1.down.weight", "unused")


class GPT(ExampleGPT):
    """Has a frozen parameter, one that nothing uses, and one of a single element."""

    def __init__(self) -> None:
        super().__init__(width=16, num_layers=4)  # one for each stage of "pipeline zbv"
        self.unused = nn.Parameter(torch.ones(3))
        self.blocks[0].up.bias.requires_grad = False


def of_all(module: nn.Module, make: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {
        name: make(param.grad)
        for name, param in module.named_parameters()
        if param.grad is not None and name.endswith(LOOKED_AT)
    }


def total(module: nn.Module) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])


def norms_of_list(module: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    return list(torch._foreach_norm(grads)) if grads else []


def sum_of_squares(module: nn.Module) -> Tensor:
    return sum(p.grad.pow(2).sum() for p in module.parameters() if p.grad is not None)


READINGS: dict[str, Callable[[nn.Module], Any]] = {
    "grad_norm 2": lambda module: grad_norm(module, 2),
    "grad_norm 1": lambda module: grad_norm(module, 1),
    "grad_norm 3": lambda module: grad_norm(module, 3.0),
    "grad_norm inf": lambda module: grad_norm(module, "inf"),
    "norm": lambda module: of_all(module, lambda grad: grad.norm()),
    "norm of a copy": lambda module: of_all(module, lambda grad: grad.detach().clone().norm()),
    "norm in double": lambda module: of_all(module, lambda grad: grad.double().norm()),
    "vector_norm": lambda module: of_all(module, torch.linalg.vector_norm),
    "flat norm": lambda module: of_all(module, lambda grad: grad.flatten().norm(p=1)),
    "total": total,
    "foreach": norms_of_list,
    "squares": sum_of_squares,
    "abs max": lambda module: of_all(module, lambda grad: grad.abs().max()),
    "min": lambda module: of_all(module, torch.min),
    "mean": lambda module: of_all(module, lambda grad: grad.mean()),
    "std": lambda module: of_all(module, lambda grad: grad.std()),
    "sum": lambda module: of_all(module, lambda grad: grad.sum(dim=tuple(range(grad.ndim)))),
    "finite": lambda module: of_all(module, lambda grad: torch.isfinite(grad).all()),
    "any": lambda module: of_all(module, lambda grad: (grad > 1e-3).any()),
    "small": lambda module: of_all(module, lambda grad: (grad.abs() < 1e-3).sum()),
    "numel": lambda module: of_all(module, lambda grad: grad.numel()),
    "shape": lambda module: of_all(module, lambda grad: tuple(grad.shape)),
    "histogram": lambda module: of_all(module, lambda grad: grad.float().histc(8, -0.01, 0.01)),
    "histogram of signs": lambda module: of_all(module, lambda grad: grad.float().sign().histc()),
    "histogram of zeros": lambda module: of_all(module, lambda grad: (grad * 0.0).histc(8)),
    "max of logarithms": lambda module: of_all(module, lambda grad: grad.log().max().isnan()),
    "full": lambda module: of_all(
        module, lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    ),
}


IN_EVERY_HOOK = ("grad_norm 2", "grad_norm inf", "squares", "numel")


def read(module: nn.Module, names: Iterable[str] = IN_EVERY_HOOK) -> dict[str, Any]:
    return {name: READINGS[name](module) for name in names}


class Reader(L.Callback):
    """Reads in every hook that sees gradients, on every rank."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.ranks: list[Any] = []

    def _read(self, hook: str, module: L.LightningModule) -> None:
        everything = hook == "on_before_optimizer_step" and module.global_step == NUM_STEPS - 1
        self.seen.append((hook, read(module, READINGS if everything else IN_EVERY_HOOK)))

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.strategy.handles_gradient_accumulation or trainer.fit_loop._should_accumulate():
            return
        self._read("on_after_backward", pl_module)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        self._read("on_before_optimizer_step", pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self._read("on_train_batch_end", pl_module)

    def on_before_zero_grad(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        self._read("on_before_zero_grad", pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ranks = [self.seen]
        if hasattr(trainer.strategy, "collectives"):
            self.ranks = trainer.strategy.collectives.all_gather_object(self.seen)


def fit(scheme: Scheme, **options: Any) -> Reader:
    torch.manual_seed(7)
    model, reader = GPT(), Reader()
    scheme.trainer(max_steps=NUM_STEPS, callbacks=[reader], **options).fit(
        model, datamodule=GlobalBatches(model, NUM_STEPS)
    )
    return reader


@cache
def alone(options: tuple[tuple[str, Any], ...] = ()) -> Reader:
    return fit(SINGLE, **dict(options))


def assert_same(got: Reader, expected: Reader, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    for seen in got.ranks:
        assert [hook for hook, _ in seen] == [hook for hook, _ in expected.seen]
        for (hook, mine), (_, theirs) in zip(seen, expected.seen, strict=True):
            assert mine.keys() == theirs.keys()
            for name in theirs:
                torch.testing.assert_close(
                    mine[name],
                    theirs[name],
                    rtol=rtol,
                    atol=atol,
                    msg=lambda found, where=(hook, name): f"{where}: {found}",
                )


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_ranks_see_norms_of_their_own_shards(name: str) -> None:
    """With clipping and accumulation."""
    assert_same(fit((SCHEMES | SLOW_SCHEMES)[name]), alone())


REFUSED: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "matmul": lambda param, grad: grad @ torch.ones(grad.shape[-1], 2),
    "item": lambda param, grad: grad[0],
    "slice": lambda param, grad: grad[:1] * 2,
    "rows": lambda param, grad: grad.view(param.shape[0], -1),
    "reshape": lambda param, grad: grad.reshape(2, -1),
    "transpose": lambda param, grad: grad.T,
    "norm of rows": lambda param, grad: grad.norm(dim=0),
    "max of rows": lambda param, grad: grad.max(dim=0),
    "sort": lambda param, grad: grad.flatten().sort(),
    "quantile": lambda param, grad: grad.median(),
    "numpy": lambda param, grad: grad.numpy(),
    "list": lambda param, grad: grad.tolist(),
    "numbers": lambda param, grad: list(grad),
    "flat list": lambda param, grad: torch.cat([grad.flatten(), grad.flatten()]),
    "other shape": lambda param, grad: grad * torch.ones(7),
    "other gradient": lambda param, grad: grad + OTHER[0].grad,
    "truth": lambda param, grad: bool(grad),
}
OTHER: list[nn.Parameter] = []


class Asks(L.Callback):
    """Asks for what cannot be computed from parts, and goes on with the message."""

    def __init__(self) -> None:
        self.messages: dict[str, str] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: GPT, *_: Any) -> None:
        param = pl_module.blocks[1].up.weight
        OTHER[:] = [pl_module.blocks[0].up.weight]
        for name, ask in REFUSED.items():
            try:
                ask(param, param.grad)
            except ConfigError as error:
                self.messages[name] = str(error)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", ["zero2", "zero3", "tensor", "pipeline"])
def test_arithmetic_that_cannot_be_right_is_an_error_with_advice(name: str) -> None:
    model, asks = GPT(), Asks()
    SCHEMES[name].trainer(max_steps=1, accumulate_grad_batches=1, callbacks=[asks]).fit(
        model, datamodule=GlobalBatches(model, 1)
    )
    assert asks.messages.keys() == REFUSED.keys()
    for message in asks.messages.values():
        assert "'blocks.1.up.weight' lies in parts" in message
        assert "full_tensor()" in message


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "clamped": lambda param: param.grad.clamp_(-1e-3, 1e-3),
    "sign": lambda param: param.grad.sign_(),
    "scaled by the norm": lambda param: param.grad.div_(param.grad.norm() + 1e-6),
    "decayed": lambda param: param.grad.add_(param.data, alpha=0.1),
    "data": lambda param: param.grad.data.mul_(0.5),
    "assigned": lambda param: setattr(param, "grad", param.grad * 0.5 + 1e-3),
    "set data": lambda param: setattr(param.grad, "data", param.grad * 0.5 - 1e-3),
    "none": lambda param: setattr(param, "grad", None),
    "zero": lambda param: param.grad.zero_(),
    "zeros": lambda param: setattr(param, "grad", torch.zeros_like(param.grad)),
    "centred": lambda param: param.grad.sub_(param.grad.mean()),
    "where": lambda param: param.grad.copy_(torch.where(param.grad > 0, param.grad, 0.0)),
    "whole": lambda param: param.grad.mul_(torch.linspace(0, 1, 1024).view(64, 16)),
    "foreach": lambda param: torch._foreach_mul_([param.grad], 0.5),
    "clipped": lambda param: nn.utils.clip_grad_norm_([param], 1e-3),
    "clipped by value": lambda param: nn.utils.clip_grad_value_([param], 1e-3),
}
IN_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


class Edited(GPT):
    """Changes a gradient in one of the hooks; its step follows what SGD would do with it."""

    def __init__(self, edit: str, hook: str) -> None:
        super().__init__()
        self.edit, self.hook = edit, hook

    def edit_in(self, hook: str) -> None:
        if hook == self.hook:
            EDITS[self.edit](self.blocks[1].up.weight)

    def on_after_backward(self) -> None:
        self.edit_in("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.edit_in("on_before_optimizer_step")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.edit_in("configure_gradient_clipping")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def edited(scheme: Scheme, edit: str, hook: str) -> Tensor:
    torch.manual_seed(7)
    model = Edited(edit, hook)
    scheme.trainer(max_steps=2, accumulate_grad_batches=1, gradient_clip_val=None).fit(
        model, datamodule=GlobalBatches(model, 2)
    )
    return model.blocks[1].up.weight.detach().clone()


EDIT_CASES = [
    (name, edit, IN_HOOKS[(i + j) % 3])
    for i, edit in enumerate(EDITS)
    for j, name in enumerate(("zero1", "zero2", "zero3", "tensor", "pipeline", "tensor stage 2"))
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("name", "edit", "hook"),
    [
        pytest.param(*case, marks=() if i % 7 == 0 else pytest.mark.slow)
        for i, case in enumerate(EDIT_CASES)
    ],
)
def test_what_user_code_makes_of_a_gradient_is_what_the_optimizer_gets(
    name: str, edit: str, hook: str
) -> None:
    expected = edited(SINGLE, edit, hook)
    torch.testing.assert_close(edited(SCHEMES[name], edit, hook), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("hook", IN_HOOKS[:2])
@pytest.mark.parametrize("name", ["shard_ddp", "zero2"])
def test_data_that_is_assigned_to_a_gradient_counts(name: str, hook: str) -> None:
    """The buffer of the next steps was the user's tensor besides, under stage 0."""
    expected = edited(SINGLE, "set data", hook)
    trained = edited(SCHEMES[name], "set data", hook)
    torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-6)


class OnRankZero(L.Callback):
    """Asks for norms on one rank only."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: GPT, *_: Any) -> None:
        if trainer.is_global_zero:
            grad_norm(pl_module, 2)


@pytest.mark.parametrize("name", ["zero2", "pipeline"])
def test_norms_that_one_rank_asks_for_are_a_mismatch(name: str) -> None:
    model = GPT()
    trainer = SCHEMES[name].trainer(max_steps=2, callbacks=[OnRankZero()])
    with pytest.raises(CollectiveMismatchError, match="disagree at its operation"):
        trainer.fit(model, datamodule=GlobalBatches(model, 2))
