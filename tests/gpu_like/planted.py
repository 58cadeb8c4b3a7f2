"""Steps with waits and mixed devices that were put there, to see that they are found.

`python -m tests.gpu_like.planted` prints what is found of each, as JSON.
"""

import json
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.gradients.usage import UsageAgreement
from tests.gpu_like.apart import fit_apart
from tests.gpu_like.device import NAME
from tests.gpu_like.fits import prepare
from tests.gpu_like.watch import Watch


def _pinned() -> Tensor:
    return torch.ones(4).pin_memory()


def _in_backward(x: Tensor) -> None:
    weight = nn.Parameter(torch.ones(4, device=NAME))
    weight.register_hook(lambda grad: grad * grad.sum().item())
    (weight * x).sum().backward()


def _into_memory(x: Tensor) -> None:
    torch.empty(4).copy_(x, non_blocking=True)


def _replacing(step: Callable[[], Any]) -> None:
    """Fail as torch's guard now and then does when it calls Python while an error is on its way."""
    try:
        step()
    except RuntimeError as error:
        raise SystemError("returned NULL without setting an exception") from error


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "cpu": lambda x: x.cpu(),
    "copy down": lambda x: torch.empty(4).copy_(x),
    "copy down, not to pinned memory": _into_memory,
    "tensor of Python's": lambda x: torch.tensor([1.0, 2.0], device=NAME),
    "pageable copy": lambda x: torch.ones(4).to(NAME, non_blocking=True),
    "blocking copy": lambda x: _pinned().to(NAME),
    "copy into": lambda x: x.copy_(torch.ones(4)),
    "a number at one element": lambda x: x.__setitem__(0, 1.0),
    "in a hook of backward": _in_backward,
}
NO_WAITS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x + 1).mul_(2).sum(),
    "a number of the host's": lambda x: x * torch.tensor(2.0),
    "pinned copy": lambda x: _pinned().to(NAME, non_blocking=True),
    "made there": lambda x: torch.full((4,), 2.0, device=NAME) + x,
    "a number at some elements": lambda x: x.__setitem__(slice(2), 1.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "backward": lambda x: (nn.Parameter(torch.ones(4, device=NAME)) * x).sum().backward(),
}
MIXED: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + torch.ones(4),
    "index": lambda x: x[torch.tensor([0, 1])],
    "cat": lambda x: torch.cat([x, torch.ones(4)]),
    "out": lambda x: torch.add(x, x, out=torch.empty(4)),
    "matmul": lambda x: torch.ones(4, 4) @ x,
    "numbers": lambda x: torch.stack([x.sum(), torch.tensor(1.0)]),
    "pinned": lambda x: _pinned() + x,
}
IN_ENGINE: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a wait as gradients are reduced": (
        FlatGradients,
        "begin_reduce",
        lambda one: one.flat.params[0].sum().item(),
    ),
    "a pageable copy": (UsageAgreement, "begin", lambda _: torch.ones(4).to(NAME)),
    "a mixture as gradients are reduced": (
        FlatGradients,
        "begin_reduce",
        lambda one: one.flat.params[0] + torch.ones(one.flat.params[0].shape),
    ),
    "a mixture whose error another one replaces": (
        FlatGradients,
        "begin_reduce",
        lambda one: _replacing(lambda: one.flat.params[0] + torch.ones(one.flat.params[0].shape)),
    ),
}
"""Into which method of the engine something is put, before what it does."""


def found() -> dict[str, Any]:
    """Return for each planted thing what is found: waits, or the error."""
    prepare()
    results: dict[str, Any] = {}
    # Before any backward here: autograd's threads do not live on in forks.
    for name, (owner, method, step) in IN_ENGINE.items():
        with patch.object(owner, method, _before(getattr(owner, method), step)):
            results[f"engine: {name}"] = fit_apart("zero3", "32-true").as_dict()
    for kind, planted in (("waits", WAITS), ("none", NO_WAITS), ("mixed", MIXED)):
        for name, step in planted.items():
            results[f"{kind}: {name}"] = _found(step)
    results["read back"] = _read_back()
    return results


def _before(function: Callable[..., Any], planted: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        planted(*args)
        return function(*args, **kwargs)

    return run


def _found(step: Callable[[Tensor], Any]) -> Any:
    with Watch() as watch:
        x = torch.ones(4, device=NAME)
        try:
            with watch.counting():
                step(x)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return [wait.what for wait in watch.found]


def _read_back() -> list[list[float]]:
    """Return what is read of a message that was sent up, and of one that was written since."""
    with Watch():
        sent = torch.tensor([1.0, 2.0, 3.0], device=NAME)
        written = torch.tensor([1.0, 2.0, 3.0], device=NAME).add_(1)
        return [sent[1:].tolist(), written.tolist()]


if __name__ == "__main__":
    print(json.dumps(found()))
