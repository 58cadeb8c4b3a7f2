"""Features of mixed formats: programs all of whose values are exact in 16 bits.

A model whose weights round to 1 and -1, of small whole numbers and a linear loss, has the same
bits on one device and on ranks, wherever its sums are cut, while its weights in 32 bits move by
less than 16 bits can hold. What user code sees of them is then known exactly, too.
"""

from random import Random

from tests.fuzz.features import EXACT, Draft, feature

BATCH_END = "on_train_batch_end(self, outputs, batch, batch_idx)"
BEFORE = "on_before_optimizer_step(self, optimizer)"


def _exact_model(draft: Draft) -> None:
    draft.dtype, draft.width, draft.num_outputs = "torch.float32", 4, 4
    draft.classes["Block"] = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, h):
        return self.layer(h)
"""
    draft.make_stem = draft.make_head = "nn.Linear(WIDTH, OUT, bias=False)"
    draft.make_blocks = "nn.ModuleList([Block() for _ in range(2)])"
    draft.late_init = [
        "for p in self.parameters():",
        "    p.data.copy_(torch.where(torch.randn_like(p) > 0, 1.0, -1.0))",
        *draft.late_init,
    ]
    for name in ("x", "y"):
        draft.fields[name] = "torch.randint(0, 2, (WIDTH,), generator=g) * 2.0 - 1"
    draft.loss = "(out.float() * y).sum(-1).mean()"
    draft.optimizer = "torch.optim.SGD(params, lr=2.0**-16)"


@feature("mixed bfloat16", slot="exact", gives=[EXACT], conflicts=["inexact"], order=-1)
def _(draft: Draft, random: Random) -> None:
    _exact_model(draft)
    draft.trainer["precision"] = '"bf16-mixed"'


@feature("mixed half with a scaler", slot="exact", gives=[EXACT], conflicts=["inexact"], order=-1)
def _(draft: Draft, random: Random) -> None:
    _exact_model(draft)
    draft.classes["MixedPrecision"] = "from lightning.pytorch.plugins import MixedPrecision"
    # Larger scales would overflow on ranks of fewer samples only.
    scaler = "torch.amp.GradScaler('cpu', init_scale=16.0, growth_interval=2)"
    draft.trainer["plugins"] = f"[MixedPrecision('16-mixed', 'cpu', {scaler})]"


@feature(
    "half precision", slot="exact", gives=[EXACT, "true half"], conflicts=["inexact"], order=-1
)
def _(draft: Draft, random: Random) -> None:
    """One step, whose gradients are exact in so few bits; those of later ones are not."""
    _exact_model(draft)
    precision = random.choice(["16-true", "bf16-true"])
    draft.width = draft.num_outputs = 4 if precision == "16-true" else 2
    draft.optimizer = "torch.optim.SGD(params, lr=2.0**-4)"
    draft.trainer |= {"precision": f'"{precision}"', "max_steps": "1"}


@feature("autocast by hand", slot="exact", gives=[EXACT], conflicts=["inexact"], order=-1)
def _(draft: Draft, random: Random) -> None:
    _exact_model(draft)
    draft.step = [
        "with torch.autocast('cpu', torch.bfloat16):",
        "    return self.loss_of(batch, batch_idx)",
    ]


@feature("exact teacher", gives=[EXACT, "copies"], needs=["exact"])
def _(draft: Draft, random: Random) -> None:
    draft.late_init += [
        "self.taught = copy.deepcopy(self.stem)",
        "self.taught.requires_grad_(False)",
    ]
    update = random.choice(["t.lerp_(p, 0.5)", "t.mul_(0.5).add_(p, alpha=0.5)"])
    draft.hook(
        BATCH_END,
        "with torch.no_grad():",
        "    for t, p in zip(self.taught.parameters(), self.stem.parameters()):",
        f"        {update}",
    )


@feature("exact decay", gives=[EXACT, "decays by batch"], needs=["exact"])
def _(draft: Draft, random: Random) -> None:
    factor = random.choice(["1 - 2.0**-14", "1 + 2.0**-13"])
    draft.hook(
        random.choice([BATCH_END, BEFORE]),
        "with torch.no_grad():",
        "    for p in self.parameters():",
        f"        p.mul_({factor})",
    )


@feature("exact average by hand", gives=[EXACT, "averages"], needs=["exact"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BATCH_END,
        "with torch.no_grad():",
        "    if not hasattr(self, 'averaged'):",
        "        self.averaged = [p.detach().clone() for p in self.parameters()]",
        "    for a, p in zip(self.averaged, self.parameters()):",
        "        a.lerp_(p.detach().to(a.dtype), 0.5)",
        "        note(self, 'average', a.double().sum())",
    )


@feature("exact sums of weights", gives=[EXACT, "reads weights"], needs=["exact"])
def _(draft: Draft, random: Random) -> None:
    value = random.choice(["p.double().sum()", "p.detach().float().sum()", "p.element_size()"])
    draft.hook(BATCH_END, "for p in self.parameters():", f"    note(self, 'of a weight', {value})")


@feature("exact weight outside autocast", gives=[EXACT], needs=["exact"], conflicts=["true half"])
def _(draft: Draft, random: Random) -> None:
    draft.terms += [
        "with torch.autocast('cpu', enabled=False):",
        "    loss = loss + self.stem.weight.float().sum() + self.head.weight.float()[0].sum()",
    ]


@feature("exact layer outside autocast", gives=[EXACT], needs=["exact"], conflicts=["true half"])
def _(draft: Draft, random: Random) -> None:
    draft.late_init.append("self.island = nn.Linear(WIDTH, 1, bias=False)")
    draft.late_init.append("self.island.weight.data.fill_(1 + 2.0**-10)")
    draft.terms += [
        "with torch.autocast('cpu', enabled=False):",
        "    loss = loss + self.island(self.unpack(batch)[0].float()).mean()",
    ]


@feature("exact gradients halved", gives=[EXACT], needs=["exact"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BEFORE,
        "for p in self.parameters():",
        "    if p.grad is not None:",
        "        p.grad.mul_(0.5)",
        "        note(self, 'size of a gradient', p.grad.element_size())",
    )


@feature("exact accumulation", gives=[EXACT], needs=["exact"], conflicts=["true half"])
def _(draft: Draft, random: Random) -> None:
    draft.trainer["accumulate_grad_batches"] = "2"


@feature("exact clamp", gives=[EXACT], needs=["exact"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BATCH_END,
        "with torch.no_grad():",
        "    for p in self.parameters():",
        "        p.clamp_(-1, 1 + 2.0**-15)",
    )


@feature("exact state kept and loaded", gives=[EXACT], needs=["exact"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BATCH_END,
        "if batch_idx == 1:",
        "    self.earlier = copy.deepcopy(self.state_dict())",
        "if batch_idx == 3:",
        "    self.load_state_dict(self.earlier)",
    )
