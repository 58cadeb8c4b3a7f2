"""Features: optimizers, their groups, and schedules.

Adaptive optimizers have a large `eps`: without one a gradient that is rounding, as that of an
attention's key bias, would become a step of full length.
"""

from random import Random

from tests.fuzz.features import Draft, feature

NONLINEAR = "nonlinear"  # the mean of the ranks' own updates is not the update of the mean
OPTIMIZERS = {
    "momentum": "SGD(params, lr=0.05, momentum=0.9)",
    "Nesterov": "SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "dampened momentum": "SGD(params, lr=0.05, momentum=0.5, dampening=0.1, foreach=True)",
    "Adam": "Adam(params, lr=0.01, eps=1e-3)",
    "AdamW": "AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1)",
    "AMSGrad": "Adam(params, lr=0.01, eps=1e-3, amsgrad=True)",
    "Adam on lists": "Adam(params, lr=0.01, eps=1e-3, foreach=True)",
    "fused AdamW": "AdamW(params, lr=0.01, eps=1e-3, fused=True)",
    "fused SGD": "SGD(params, lr=0.05, momentum=0.9, fused=True)",
    "Adagrad": "Adagrad(params, lr=0.02, eps=1e-2)",
    "RMSprop": "RMSprop(params, lr=1e-3, eps=1e-2, momentum=0.5, centered=True)",
    "Adadelta": "Adadelta(params, lr=0.5, eps=1e-2)",
    "Adamax": "Adamax(params, lr=0.01, eps=1e-2)",
    "NAdam": "NAdam(params, lr=0.01, eps=1e-3)",
    "RAdam": "RAdam(params, lr=0.01, eps=1e-3)",
    "ASGD": "ASGD(params, lr=0.02, t0=2)",
    "Adafactor": "Adafactor(params, lr=0.01)",
    "LBFGS": "LBFGS([p for p in params if p.requires_grad], lr=0.1, max_iter=2)",
    "SGD that ascends": "SGD(params, lr=-0.05 * -1, weight_decay=0.1)",
}
LINEAR = {"momentum", "Nesterov", "dampened momentum", "fused SGD", "SGD that ascends", "ASGD"}
CONFLICTS = {
    "LBFGS": ["manual", "accumulates"],
    # It divides by gradients' own size: that of an attention's key bias, or of a bias before a
    # batch norm, is rounding.
    "Adafactor": ["attends", "batch norm"],
}


def _declare(name: str, source: str) -> None:
    gives = [] if name in LINEAR else [NONLINEAR]
    conflicts = CONFLICTS.get(name, [])

    @feature(
        name,
        slot="optimizer",
        gives=[*gives, *([name + "!"] if name == "LBFGS" else [])],
        conflicts=conflicts,
    )
    def _(draft: Draft, random: Random) -> None:
        draft.optimizer = f"torch.optim.{source}"


for _name, _source in OPTIMIZERS.items():
    _declare(_name, _source)


@feature("groups with and without decay", slot="groups", conflicts=["LBFGS!", "several optimizers"])
def _(draft: Draft, random: Random) -> None:
    draft.params = (
        "[{'params': [p for p in self.parameters() if p.ndim > 1], 'weight_decay': 0.1}, "
        "{'params': [p for p in self.parameters() if p.ndim <= 1], 'weight_decay': 0.0}]"
    )


@feature(
    "head at a rate of its own",
    slot="groups",
    conflicts=["LBFGS!", "several optimizers", "tied", "head"],
)
def _(draft: Draft, random: Random) -> None:
    draft.params = (
        "[{'params': [p for n, p in self.named_parameters() if not n.startswith('head')]}, "
        "{'params': list(self.head.parameters()), 'lr': 0.01}]"
    )


@feature("trained parameters only", slot="groups", conflicts=["several optimizers"])
def _(draft: Draft, random: Random) -> None:
    draft.params = "[p for p in self.parameters() if p.requires_grad]"


@feature("named parameters", slot="groups", conflicts=["several optimizers", "LBFGS!"])
def _(draft: Draft, random: Random) -> None:
    draft.params = "list(self.named_parameters())"


@feature("some parameters only", slot="groups", conflicts=["several optimizers", "LBFGS!"])
def _(draft: Draft, random: Random) -> None:
    draft.params = "[p for n, p in self.named_parameters() if 'bias' not in n]"


@feature("parameters in reverse", slot="groups", conflicts=["several optimizers"])
def _(draft: Draft, random: Random) -> None:
    draft.params = "list(self.parameters())[::-1]"


SCHEDULES = {
    "steps by epochs": ("StepLR(optimizer, 1, 0.5)", ""),
    "steps by batches": ("StepLR(optimizer, 2, 0.5)", ', "interval": "step"'),
    "one cycle": (
        "OneCycleLR(optimizer, 0.05, total_steps=20, cycle_momentum=False)",
        ', "interval": "step"',
    ),
    "cosine": ("CosineAnnealingLR(optimizer, 6)", ', "interval": "step"'),
    "warm-up by a function": (
        "LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))",
        ', "interval": "step"',
    ),
    "every second step": ("ExponentialLR(optimizer, 0.5)", ', "interval": "step", "frequency": 2'),
    "two schedules": (
        "SequentialLR(optimizer, [ConstantLR(optimizer, 0.5), ExponentialLR(optimizer, 0.9)], [2])",
        ', "interval": "step"',
    ),
}


def _schedule(name: str, source: str, options: str) -> None:
    @feature(name, slot="schedule", conflicts=["manual", "LBFGS!"])
    def _(draft: Draft, random: Random) -> None:
        for one in ("ConstantLR", "ExponentialLR", "SequentialLR"):
            if one in source:
                draft.classes[one] = f"from torch.optim.lr_scheduler import {one}"
        made = source if "SequentialLR" in source else f"torch.optim.lr_scheduler.{source}"
        draft.configured = [
            f"schedule = {made}",
            f'of_rates = {{"scheduler": schedule{options}}}',
            'return {"optimizer": optimizer, "lr_scheduler": of_rates}',
        ]


for _name, (_source, _options) in SCHEDULES.items():
    _schedule(_name, _source, _options)


@feature(
    "plateau",
    slot="schedule",
    gives=["monitors"],
    needs=["validates"],
    conflicts=["manual", "LBFGS!"],
)
def _(draft: Draft, random: Random) -> None:
    draft.configured = [
        "from torch.optim.lr_scheduler import ReduceLROnPlateau",
        "schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)",
        'of_rates = {"scheduler": schedule, "monitor": "val_loss"}',
        'return {"optimizer": optimizer, "lr_scheduler": of_rates}',
    ]
