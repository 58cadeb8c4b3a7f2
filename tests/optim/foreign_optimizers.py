"""Stand-ins for optimizers of other packages: what decides whether ranks may step on shards.

Each has its original's rule, and no options: who finds its rate from all gradients (D-Adaptation,
Prodigy), who divides by norms of a parameter (LAMB, LARS) or keeps rows and columns (Adafactor,
CAME), and who goes element by element (Lion, MADGRAD, SPAM, Sophia, schedule-free, Lookahead).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


class Plain(Optimizer):
    """Steps along what `direction` makes of each gradient."""

    more: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, params: Any, lr: float = 0.01, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **self.more, **more})

    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def begin(self, group: dict[str, Any]) -> None:
        """Look at all gradients before the first update."""

    def each(self, group: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        for param in group["params"]:
            if param.grad is not None:
                yield param, self.state[param]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            self.begin(group)
            for param, state in self.each(group):
                param.sub_(self.direction(param, state, group), alpha=group["lr"])
        return loss


def moment(state: dict[str, Any], name: str, value: Tensor, decay: float) -> Tensor:
    """Return a running average, kept in a state."""
    held = state.setdefault(name, torch.zeros_like(value))
    held.lerp_(value, 1 - decay)
    return held


class DAdaptation(Plain):
    """Its rate `d` grows from 1e-6, by sums over all parameters; its first steps are tiny."""

    more = {"d": 1e-6, "numerator": 0.0}  # noqa: RUF012

    def begin(self, group: dict[str, Any]) -> None:
        total = 0.0
        for param, state in self.each(group):
            s = state.setdefault("s", torch.zeros_like(param))
            group["numerator"] += group["lr"] * group["d"] * float((param.grad * s).sum())
            s.add_(param.grad, alpha=group["d"] * group["lr"])
            total += float(s.abs().sum())
        if total > 0:
            group["d"] = max(group["d"], min(2 * group["numerator"] / total, 1.02 * group["d"]))

    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        return group["d"] * param.grad


class Prodigy(DAdaptation):
    """The same with Adam's second moment, and its rate in a tensor that it keeps itself."""

    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        square = moment(state, "square", group["d"] * param.grad.square(), 0.99)
        return group["d"] * param.grad / (square.sqrt() + group["d"] * 1e-8)


class ClipsAll(Plain):
    """Clips by the norm of all gradients, in steps that are small beside the weights."""

    more = {"lr": 1e-9}  # noqa: RUF012

    def begin(self, group: dict[str, Any]) -> None:
        norms = [param.grad.norm() for param, _ in self.each(group)]
        self.norm = torch.stack(norms).norm() if norms else torch.ones(())

    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        return 1e-7 * param.grad / self.norm.clamp(min=1.0)


class LAMB(Plain):
    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        update = moment(state, "m", param.grad, 0.9)
        update = update / (moment(state, "v", param.grad.square(), 0.99).sqrt() + 1e-6)
        return update * (param.norm() / update.norm())


class LARS(Plain):
    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        return 1e-3 * param.grad * param.norm() / (param.grad.norm() + 1e-8)


class Adafactor(Plain):
    """Keeps averages of a matrix's rows and columns, and of a vector each element."""

    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        square = param.grad.square() + 1e-30
        if param.ndim < 2:
            return param.grad / moment(state, "v", square, 0.99).sqrt()
        rows = moment(state, "rows", square.mean(-1, keepdim=True), 0.99)
        columns = moment(state, "columns", square.mean(-2, keepdim=True), 0.99)
        return param.grad * (rows.mean(-2, keepdim=True) / (rows * columns)).sqrt()


class CAME(Adafactor):
    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        update = super().direction(param, state, group)
        mean = moment(state, "m", update, 0.9)
        if param.ndim < 2:
            return mean
        doubt = moment(state, "doubt", (update - mean).square().mean(-1, keepdim=True) + 1e-8, 0.99)
        return mean / doubt.sqrt()


class Lion(Plain):
    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        held = state.setdefault("m", torch.zeros_like(param))
        update = (0.9 * held + 0.1 * param.grad).sign()
        held.lerp_(param.grad, 0.01)
        return update


class MADGRAD(Plain):
    """Counts its steps under a name of its own, and steps from where a parameter began."""

    def begin(self, group: dict[str, Any]) -> None:
        self.state["k"] = self.state.get("k", 0) + 1

    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        began = state.setdefault("began", param.clone())
        rate = self.state["k"] ** 0.5
        s = state.setdefault("s", torch.zeros_like(param)).add_(param.grad, alpha=rate)
        v = state.setdefault("v", torch.zeros_like(param)).add_(param.grad.square(), alpha=rate)
        target = began - 0.01 * s / (v.pow(1 / 3) + 1e-6)
        return (param - target) / group["lr"]


class SPAM(Plain):
    """Cuts spikes of single elements, and forgets its moments now and then."""

    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        state["count"] = state.get("count", 0) + 1
        if state["count"] % 25 == 0:
            state["m"], state["v"] = torch.zeros_like(param), torch.zeros_like(param)
        held = state.setdefault("v", torch.zeros_like(param))
        limit = (50 * held).sqrt()
        is_spike = (param.grad.abs() > limit) & (held > 0)
        grad = torch.where(is_spike, param.grad.sign() * limit, param.grad)
        update = moment(state, "m", grad, 0.9)
        return update / (moment(state, "v", grad.square(), 0.99).sqrt() + 1e-6)


class Sophia(Plain):
    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        hessian = moment(state, "hessian", param.grad.square(), 0.99)
        return (moment(state, "m", param.grad, 0.9) / (0.04 * hessian + 1e-15)).clamp(-1, 1)


class ScheduleFree(Plain):
    """Steps in one of its two modes only, and keeps a sum of weights in its group."""

    more = {"train_mode": False, "sum": 0.0}  # noqa: RUF012

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if not group["train_mode"] and "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], 0.1)
            group["train_mode"] = True

    @torch.no_grad()
    def eval(self) -> None:
        """Show averaged weights, for a validation."""
        for group in self.param_groups:
            for param in group["params"]:
                if group["train_mode"] and "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], 1 - 1 / 0.9)
            group["train_mode"] = False

    @torch.no_grad()
    def normalize(self, norm: float = 1.0) -> None:
        """Scale weights and state by a norm that no shard has."""
        for param in self.param_groups[0]["params"]:
            for tensor in (param, *self.state[param].values()):
                tensor.mul_(norm / param.norm())

    def begin(self, group: dict[str, Any]) -> None:
        if not group["train_mode"]:
            raise RuntimeError("Optimizer was not in train mode when step is called.")
        group["sum"] += group["lr"] ** 2

    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        z = state.setdefault("z", param.clone())
        part = group["lr"] ** 2 / group["sum"]
        moved = param.lerp(z, part) - 0.1 * group["lr"] * param.grad
        z.sub_(param.grad, alpha=group["lr"])
        return (param - moved) / group["lr"]


class EarlySteps(ScheduleFree):
    """Has the closure see weights between the two that it keeps."""

    more = {"train_mode": True, "sum": 0.0}  # noqa: RUF012

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.lerp_(self.state[param].setdefault("z", param.clone()), 0.1)
        return super().step(closure)


class OfOwnForm(Optimizer):
    """Wraps an optimizer, calls no constructor of torch, and saves in a form of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.state = optimizer, defaultdict(dict)
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._patch_step_function()  # type: ignore[no-untyped-call]

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["inner"])


class Lookahead(Optimizer):
    """Wraps an optimizer, whose groups are its own, as pytorch_optimizer's does."""

    def __init__(self, optimizer: Optimizer, k: int = 3) -> None:
        self.optimizer, self.k = optimizer, k
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state: Any = defaultdict(dict)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.clone())
                if self.count % self.k == 0:
                    param.copy_(slow.lerp_(param, 0.5))
        return loss


class OfOneName(Plain):
    """Its constructor takes other arguments than its defaults say, and its copy cannot step."""

    def __init__(self, params: Any, *, name: str) -> None:
        super().__init__(params, 0.01)
        self.known = {id(param): name for group in self.param_groups for param in group["params"]}

    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        return param.grad if self.known[id(param)] else 0 * param.grad


Make = Callable[[Any], Optimizer]
BY_ELEMENT: dict[str, Make] = {
    **{kind.__name__: kind for kind in (Lion, MADGRAD, SPAM, Sophia, ScheduleFree)},
    "Lookahead": lambda params: Lookahead(SGD(params, lr=0.1, momentum=0.9)),
}
BY_PARAMETER: dict[str, Make] = {kind.__name__: kind for kind in (LAMB, LARS, Adafactor, CAME)}
OF_ALL: dict[str, Make] = {kind.__name__: kind for kind in (DAdaptation, Prodigy, ClipsAll)}
