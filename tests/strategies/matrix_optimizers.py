"""Optimizers that need full matrices, written as their usual authors do, and a GPT trained by each.

`Muon` follows the usual third-party one for a single device: matrices by orthogonalised momentum
and the rest by Adam, told apart by a flag in its param groups. Its iteration runs in float64, so
that two runs can be compared; torch's own runs it in bfloat16.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer

from tests.checkpoint.sharded.runs import Model
from tests.strategies.models import ExampleGPT


class Muon(Optimizer):
    """Momentum, orthogonalised for matrices; Adam for groups without `use_muon`."""

    def __init__(self, param_groups: Any, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        for group in param_groups:
            group.setdefault("lr", 0.02 if group["use_muon"] else 3e-4)
            group.setdefault("weight_decay", 0.1)
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)  # as the usual one does
                state = self.state[param]
                update = self._muon if group["use_muon"] else self._adam
                step = update(param.grad, state)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(step.reshape(param.shape), alpha=-group["lr"])
        return loss

    def _muon(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum = state["momentum_buffer"].lerp_(grad, 0.05)
        return orthogonalised(grad.lerp(momentum, 0.95), self.dtype)

    def _adam(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state |= {"exp_avg": torch.zeros_like(grad), "exp_avg_sq": torch.zeros_like(grad)}
            state["step"] = 0
        state["step"] += 1
        mean = state["exp_avg"].lerp_(grad, 0.1) / (1 - 0.9 ** state["step"])
        square = state["exp_avg_sq"].lerp_(grad.square(), 0.05) / (1 - 0.95 ** state["step"])
        return mean / (square.sqrt() + 1e-3)


def orthogonalised(matrix: Tensor, dtype: torch.dtype, num_steps: int = 5) -> Tensor:
    assert matrix.ndim == 2
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(dtype)
    if matrix.size(-2) > matrix.size(-1):
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if matrix.size(-2) > matrix.size(-1):
        x = x.mT
    ratio: float = max(1.0, matrix.size(-2) / matrix.size(-1)) ** 0.5
    return (x * ratio).to(matrix.dtype)


class Shampoo(Optimizer):
    """Each side of a matrix has a factor; state of other shapes than the parameter's."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self._update(param), alpha=-group["lr"])
        return loss

    def _update(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        state, grad = self.state[param], param.grad.double()
        if not state:
            state["num_steps"] = 0
            for dim, size in enumerate(param.shape):
                state[f"factor_{dim}"] = 1e-2 * torch.eye(size)
        state["num_steps"] += 1
        for dim in range(grad.ndim):
            flat = grad.movedim(dim, 0).reshape(grad.shape[dim], -1)
            factor = state[f"factor_{dim}"].add_(flat @ flat.T).double()
            values, vectors = torch.linalg.eigh(factor)
            root = vectors @ torch.diag(values.pow(-1 / (2 * grad.ndim))) @ vectors.T
            grad = torch.tensordot(root, grad, dims=([1], [dim])).movedim(0, dim)
        return grad.to(param.dtype)


def matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of the blocks, and all other parameters."""
    inner = [p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2]
    known = set(inner)
    trained = [param for param in model.parameters() if param.requires_grad]
    return inner, [param for param in trained if param not in known]


def muon_groups(model: nn.Module) -> Optimizer:
    inner, rest = matrices(model)
    return Muon([{"params": inner, "use_muon": True}, {"params": rest, "use_muon": False}])


def torch_muon(model: nn.Module) -> Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)


def adafactor_of_transformers(model: nn.Module) -> Optimizer:
    return transformers.optimization.Adafactor(
        model.parameters(),
        lr=1e-2,
        eps=(1e-6, 1e-3),  # gradients that are zero but for rounding would count as others do
        relative_step=False,
        scale_parameter=True,
        warmup_init=False,
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adafactor": lambda model: Adafactor(model.parameters(), lr=0.02),
    "transformers": adafactor_of_transformers,
    "muon": muon_groups,
    "shampoo": lambda model: Shampoo(model.parameters()),
    "torch muon": torch_muon,
}


class Matrices(Model):
    """A small model with a scalar and a frozen bias, trained by one of `OPTIMIZERS`."""

    def __init__(self, optimizer: str = "muon") -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


class TwoOptimizers(Matrices):
    """Muon for the matrices of the blocks and AdamW for the rest, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        inner, rest = matrices(self)
        return [Muon([{"params": inner, "use_muon": True}]), AdamW(rest, lr=1e-2, eps=1e-3)]


class MatricesGPT(ExampleGPT):
    """The example's GPT, trained by one of `OPTIMIZERS`."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self)


def build(name: str) -> Matrices:
    """Return a small model, with the same values every time."""
    torch.manual_seed(0)
    return TwoOptimizers() if name == "two" else Matrices(name)
