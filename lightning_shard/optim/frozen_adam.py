"""Adam's steps from the end of a compressor's warm-up on: its second moment is frozen.

    p -= lr m / (sqrt(v) + eps)      v: as it was when the warm-up ended
                                     m: what came, if it is momentum that travels; else made of it

What error feedback sends comes late and all at once, and Adam would divide each spike by itself.
Under a fixed v it counts in full, up to a limit for each step.

The optimizer's own step passes over these parameters: while it runs they have no gradient. Their
counter of steps stays where v was frozen, so that v's bias correction stays right.
Source: 1-bit Adam, arXiv:2102.02888, algorithm 1.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_shard.data_parallel.compression import Exchange
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import ConfigError


class FrozenAdam:
    """Takes an optimizer's steps under a frozen second moment, inside the optimizer's view.

    Args:
        optimizer: The user's optimizer, which has to be Adam where a compressor freezes its
            variance.
        engine: The engine that tells of each parameter how its gradient was exchanged.

    Raises:
        ConfigError: The optimizer is to be Adam and is not, or momentum travels and it adds its
            own.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._compresses = bool(engine.exchanges)
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []
        for group in optimizer.param_groups:
            for exchange in map(engine.exchange_of, group["params"]):
                if exchange is not None and exchange.freezes_variance:
                    _check_adam(optimizer, group, exchange)
                elif exchange is not None and exchange.keeps_momentum:
                    _check_no_momentum(optimizer, group)
        self._tell_factor()

    def take(self) -> None:
        """Update what has a frozen second moment, and hide it from the optimizer's own step."""
        for group in self._optimizer.param_groups if self._compresses else ():
            for param in group["params"]:
                exchange = self._engine.exchange_of(param)
                if exchange is None or not exchange.froze_variance or param.grad is None:
                    continue
                state = self._optimizer.state.get(param, {})
                if "exp_avg_sq" in state and state["step"] >= exchange.variance_steps:
                    self._update(param, state, group, exchange)
                    self._set_aside.append((param, param.grad))
                    param.grad = None

    def put_back(self) -> None:
        """Give the parameters back the gradients that were hidden from the optimizer's own step."""
        for param, grad in self._set_aside:
            param.grad = grad
        self._set_aside.clear()
        self._tell_factor()

    @torch.no_grad()
    def _update(
        self,
        param: nn.Parameter,
        state: dict[str, Any],
        group: dict[str, Any],
        exchange: Exchange,
    ) -> None:
        scale = getattr(self._optimizer, "grad_scale", None)  # fused ones unscale by themselves
        overflow = getattr(self._optimizer, "found_inf", None)
        if overflow is not None and overflow.item():
            return
        learning_rate, decay = float(group["lr"]), group["weight_decay"]
        assert param.grad is not None
        came = param.grad if scale is None else param.grad / scale
        pull: Tensor | float = 0.0
        if group.get("decoupled_weight_decay", isinstance(self._optimizer, AdamW)):
            param.mul_(1.0 - learning_rate * decay)
        elif decay:
            pull = decay * param
        if exchange.sends_momentum:
            momentum = state["exp_avg"].copy_(came) + pull
        else:
            gain = 1.0 - float(group["betas"][0])
            momentum = state["exp_avg"].lerp_((came + pull).to(state["exp_avg"]), gain)
        variance = state["exp_avg_sq"] / (1.0 - group["betas"][1] ** float(state["step"]))
        # One scale for many signs is far too much for a value whose gradients are small. Adam's
        # own steps are hardly ever greater than the learning rate.
        limit = exchange.update_limit
        if exchange.fills_variance:
            variance = _filled(variance, momentum)
        update = (momentum / (variance.sqrt() + group["eps"])).clamp_(-limit, limit)
        update.masked_fill_(variance == 0.0, 0.0)  # signs are sent of what has no gradient, too
        param.add_(update, alpha=-learning_rate)

    def _tell_factor(self) -> None:
        """Tell each exchange the factor of its next update, which schedulers may have changed."""
        for group in self._optimizer.param_groups if self._compresses else ():
            for param in group["params"]:
                exchange = self._engine.exchange_of(param)
                if exchange is not None and exchange.sends_momentum:
                    slot = self._engine.slot_of(param)
                    exchange.momentum_factors[slot] = float(group["betas"][0])


def _filled(variance: Tensor, momentum: Tensor) -> Tensor:
    """Give what had no gradient in the warm-up the mean of the others, or of what has come."""
    known = variance > 0.0
    mean = variance.sum() / known.sum()
    typical = torch.where(known.any(), mean, momentum.square().mean())
    return torch.where(known, variance, typical)


def _check_adam(optimizer: Optimizer, group: dict[str, Any], exchange: Exchange) -> None:
    if not isinstance(optimizer, (Adam, AdamW)) or group["amsgrad"] or group["maximize"]:
        how = "sends" if exchange.sends_momentum else "freezes the second moment beside"
        raise ConfigError(
            f"The compressor {how} Adam's momentum, which {type(optimizer).__name__} with "
            f"amsgrad={group.get('amsgrad')}, maximize={group.get('maximize')} cannot use; "
            f"expected torch's Adam or AdamW without these. Or make it with adam=False, as "
            f"compression=OneBit(adam=False): then gradients travel, and the optimizer's own step "
            f"takes them."
        )


def _check_no_momentum(optimizer: Optimizer, group: dict[str, Any]) -> None:
    own = group.get("momentum") or group.get("betas", (0.0,))[0]
    if own:
        raise ConfigError(
            f"The compressor sends momentum, and {type(optimizer).__name__} has a momentum of "
            f"{own} of its own, expected 0: it would count twice. Use SGD without momentum, or "
            f"TopK(momentum=0.0)."
        )
