"""What users do in hooks, drawn at random: fits with a few such deeds, on one device or on ranks.

seed ──> Deed(edit, hook, step), Deed ... ──> the same fit everywhere ──> weights and losses
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.strategies.schemes import OfRanks
from tests.strategies.stacks import WIDTH, Fitted, fit

HOOKS = (
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_epoch_end",
)
OF_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
Edit = Callable[[Any], object]


def parameters(module: Any) -> list[Any]:
    return [param for param in module.parameters() if param.requires_grad]


def optimizer_of(module: Any) -> Any:
    return module.trainer.optimizers[0]


def state_of(module: Any) -> Any:
    return optimizer_of(module).state


def freezes(module: Any) -> None:
    module.blocks[1].requires_grad_(not module.blocks[1].layer.weight.requires_grad)


@torch.no_grad()
def decays(module: Any) -> None:
    for param in module.parameters():
        param.mul_(0.9)


def clamps(module: Any) -> None:
    for param in module.parameters():
        param.data.clamp_(-0.3, 0.3)


def assigns(module: Any) -> None:
    module.blocks[0].layer.weight.data = module.blocks[0].layer.weight.data * 0.7


def averages(module: Any) -> None:
    for mine, theirs in zip(module.blocks.parameters(), module.teacher.parameters(), strict=True):
        theirs.data = theirs.data * 0.5 + mine.data * 0.5


@torch.no_grad()
def averages_in_place(module: Any) -> None:
    for mine, theirs in zip(module.blocks.parameters(), module.teacher.parameters(), strict=True):
        theirs.mul_(0.5).add_(mine, alpha=0.5)


def loads(module: Any) -> None:
    state = module.teacher.state_dict()
    module.teacher.load_state_dict({name: value * 0.5 for name, value in state.items()})


def replaces(module: Any) -> None:
    old = module.head.weight
    module.head.weight = nn.Parameter(old.detach().clone() * 0.5)
    for group in optimizer_of(module).param_groups:
        group["params"] = [module.head.weight if p is old else p for p in group["params"]]


def resets(module: Any) -> None:
    for param in parameters(module):
        if "momentum_buffer" in state_of(module).get(param, {}):
            state_of(module)[param]["momentum_buffer"] = torch.zeros_like(param)


def halves_momentum(module: Any) -> None:
    for param in parameters(module):
        if param in state_of(module) and state_of(module)[param].get("momentum_buffer") is not None:
            state_of(module)[param]["momentum_buffer"].mul_(0.5)


def lowers_rate(module: Any) -> None:
    for group in optimizer_of(module).param_groups:
        group["lr"] *= 0.7


def decays_more(module: Any) -> None:
    optimizer_of(module).param_groups[0]["weight_decay"] = 0.1


def drops_parameter(module: Any) -> None:
    params = optimizer_of(module).param_groups[0]["params"]
    if len(params) > 8:
        params.pop(4)


def moves_group(module: Any) -> None:
    groups = optimizer_of(module).param_groups
    if len(groups[0]["params"]) > 8:
        optimizer_of(module).add_param_group({"params": [groups[0]["params"].pop(5)], "lr": 0.03})


def skips(module: Any) -> None:
    module.skipped = True


def changes_buffer(module: Any) -> None:
    module.scale.mul_(0.8)


def scales(module: Any) -> None:
    for param in parameters(module):
        if param.grad is not None:
            param.grad.mul_(0.5)


def scales_anew(module: Any) -> None:
    for param in parameters(module):
        if param.grad is not None:
            param.grad = param.grad * 0.5


def scales_together(module: Any) -> None:
    torch._foreach_mul_([param.grad for param in parameters(module) if param.grad is not None], 0.5)


def forgets(module: Any) -> None:
    module.head.bias.grad = None


def zeroes(module: Any) -> None:
    for param in module.blocks[2].parameters():
        if param.grad is not None:
            param.grad.zero_()


def adds_decay(module: Any) -> None:
    for param in parameters(module):
        if param.grad is not None:
            param.grad.add_(param.detach(), alpha=0.1)


def clips(module: Any) -> None:
    clip_grad_norm_([param for param in parameters(module) if param.grad is not None], 0.05)


OF_WEIGHTS: tuple[Edit, ...] = (
    freezes,
    decays,
    clamps,
    assigns,
    averages,
    averages_in_place,
    loads,
    replaces,
    lowers_rate,
    decays_more,
    drops_parameter,
    moves_group,
    skips,
    changes_buffer,
)
OF_STATE: tuple[Edit, ...] = (resets, halves_momentum)
LINEAR: tuple[Edit, ...] = (scales, scales_anew, scales_together, forgets, zeroes, adds_decay)
OTHERS: tuple[Edit, ...] = (clips,)


@dataclass(frozen=True)
class Deed:
    """Something that a hook does, at one batch."""

    edit: Edit
    hook: str
    batch: int

    def __str__(self) -> str:
        return f"{self.edit.__name__} in {self.hook} at batch {self.batch}"


def drawn(seed: int, *, nonlinear: bool = True, state: bool = True, number: int = 3) -> list[Deed]:
    """Return some deeds, the same for a seed."""
    generator = random.Random(seed)
    edits = [*OF_WEIGHTS, *LINEAR, *(OTHERS if nonlinear else ()), *(OF_STATE if state else ())]
    chosen = generator.sample(edits, number)
    of_gradients = (*LINEAR, *OTHERS)
    return [
        Deed(
            edit,
            generator.choice(OF_GRADIENTS if edit in of_gradients else HOOKS),
            generator.randrange(1, 4),
        )
        for edit in chosen
    ]


class Behaving(OfRanks):
    """Does its deeds, has a teacher and an average of several losses."""

    deeds: Sequence[Deed] = ()
    momentum = 0.9

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(self.block() for _ in range(4)).requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))
        self.skipped, self.batch = False, 0

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        taught = self.teacher[0](x.detach())
        return super().loss(batch) * self.scale + (self.blocks[0](x) - taught).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch = batch_idx
        loss = self.loss(batch)
        if self.skipped:
            self.skipped = False
            return loss * 0.0
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(parameters(self), lr=0.1, momentum=self.momentum)

    def do(self, hook: str) -> None:
        for deed in self.deeds:
            is_now = deed.batch == self.batch or hook == "on_train_epoch_end"
            if deed.hook == hook and is_now:
                deed.edit(self)


def _hook(name: str) -> Any:
    def hook(self: Behaving, *_: Any) -> None:
        self.do(name)

    return hook


for _name in HOOKS:
    setattr(Behaving, _name, _hook(_name))


def behaving(deeds: Sequence[Deed], **attributes: Any) -> type[Behaving]:
    """Return a module that does these."""
    return type("Behaves", (Behaving,), {"deeds": deeds, **attributes})


def fit_behaving(deeds: Sequence[Deed], strategy: Any = "auto", **options: Any) -> Fitted:
    """Fit a module that does these deeds; the attribute `momentum` is its optimizer's."""
    momentum = options.pop("momentum", 0.9)
    return fit(behaving(deeds, momentum=momentum), strategy, **options)


assert WIDTH > 1
