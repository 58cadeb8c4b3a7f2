"""Two optimizers whose momentum lies in 8 bits and blocks, as those of other packages keep it.

    Blocked    as bitsandbytes: codes, scales and a table are entries; the last block may be short
    Joined     as torchao: one tensor made of these three, where blocks fit the parameter exactly

Parameters of few elements keep their momentum as it is.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.optim.foreign_optimizers import Plain

BLOCK, FEWEST = 16, 64
DECAY = 0.9


def table() -> Tensor:
    """Return the value of each code, of a block whose largest is one."""
    return torch.linspace(-1, 1, 256)


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes in the shape of the values, and a scale for each block."""
    flat = values.flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale = padded.abs().amax(1)
    codes = ((padded / scale.clamp_min(1e-30).unsqueeze(1) + 1) * 127.5).round()
    return codes.to(torch.uint8).flatten()[: flat.numel()].view(values.shape), scale.float()


def values_of(codes: Tensor, scale: Tensor, qmap: Tensor) -> Tensor:
    """Return what codes stand for."""
    scales = scale.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)
    return qmap[codes.long()] * scales


class Blocked(Plain):
    """Keeps codes, scales and table by themselves."""

    def is_small(self, param: Tensor) -> bool:
        return param.numel() < FEWEST

    def direction(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        if not state:
            self.begin_state(param, state)
        state["step"] += 1
        momentum = self.momentum(state) * DECAY + param.grad
        self.keep(state, momentum)
        return momentum

    def begin_state(self, param: Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        if self.is_small(param):
            state["codes"] = torch.zeros_like(param)
            return
        zeros = torch.full_like(param, 128, dtype=torch.uint8)
        blocks = -(-param.numel() // BLOCK)
        state |= {"codes": zeros, "scale": torch.zeros(blocks), "qmap": table()}

    def momentum(self, state: dict[str, Any]) -> Tensor:
        if "scale" not in state:
            return state["codes"]
        return values_of(state["codes"], state["scale"], state["qmap"])

    def keep(self, state: dict[str, Any], momentum: Tensor) -> None:
        if "scale" not in state:
            state["codes"].copy_(momentum)
            return
        for held, value in zip((state["codes"], state["scale"]), quantised(momentum), strict=True):
            held.copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for one in self.state.values():  # torch gives codes the format of the parameter
            if "scale" in one:
                one["codes"] = one["codes"].to(torch.uint8)


class Codes(Tensor):
    """Momentum in 8 bits: one tensor made of codes, scales and a table."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, qmap: Tensor, shape: Any) -> "Codes":
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale, made.qmap, made.own_shape = codes, scale, qmap, tuple(shape)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale", "qmap"], [self.own_shape]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> "Codes":
        return cls(parts["codes"], parts["scale"], parts["qmap"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one = args[0]
        if func is torch.ops.aten.copy_.default:
            for held, value in zip((one.codes, one.scale), quantised(args[1]), strict=True):
                held.copy_(value.view(held.shape))
            return one
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            device = (kwargs or {}).get("device")
            parts = [part.to(device, copy=True) for part in (one.codes, one.scale, one.qmap)]
            return cls(*parts, one.own_shape)
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Joined(Blocked):
    """Keeps them as one tensor."""

    def is_small(self, param: Tensor) -> bool:
        return super().is_small(param) or param.numel() % BLOCK > 0

    def begin_state(self, param: Tensor, state: dict[str, Any]) -> None:
        state["step"] = torch.tensor(0.0)
        if self.is_small(param):
            state["momentum"] = torch.zeros_like(param)
        else:
            zeros = torch.full_like(param, 128, dtype=torch.uint8)
            scale = torch.zeros(param.numel() // BLOCK)
            state["momentum"] = Codes(zeros, scale, table(), param.shape)

    def momentum(self, state: dict[str, Any]) -> Tensor:
        held = state["momentum"]
        if not isinstance(held, Codes):
            return held
        return values_of(held.codes, held.scale, held.qmap).view(held.own_shape)

    def keep(self, state: dict[str, Any], momentum: Tensor) -> None:
        state["momentum"].copy_(momentum)


OPTIMIZERS: dict[str, type[Optimizer]] = {"entries": Blocked, "one tensor": Joined}
