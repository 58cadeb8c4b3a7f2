"""Features: what a training step does, and what a loss is made of."""

from random import Random

from tests.fuzz.features import Draft, feature

MANUAL = "manual"


def _manual(draft: Draft, *lines: str) -> None:
    draft.init.append("self.automatic_optimization = False")
    draft.step = list(lines)


@feature("step that returns a dict", slot="step")
def _(draft: Draft, random: Random) -> None:
    draft.step = [
        "loss = self.loss_of(batch, batch_idx)",
        "return {'loss': loss, 'more': loss.detach() * 2}",
    ]


@feature("loss logged in the step", gives=["logs"])
def _(draft: Draft, random: Random) -> None:
    epoch = random.choice(["on_step=True", "on_epoch=True", "on_step=True, on_epoch=True"])
    draft.terms += [
        "size = len(self.unpack(batch)[1])",
        f'self.log("train", loss, batch_size=size, sync_dist=True, {epoch})',
    ]


@feature("manual optimization", slot="step", gives=[MANUAL])
def _(draft: Draft, random: Random) -> None:
    last = random.choice(["opt.step()", "opt.step(); opt.zero_grad()"])
    _manual(
        draft,
        "opt = self.optimizers()",
        "opt.zero_grad()",
        "loss = self.loss_of(batch, batch_idx)",
        "self.manual_backward(loss)",
        last,
        "return loss",
    )


@feature("manual clipping", slot="step", gives=[MANUAL, "nonlinear"])
def _(draft: Draft, random: Random) -> None:
    kind = random.choice(["norm", "value"])
    _manual(
        draft,
        "opt = self.optimizers()",
        "loss = self.loss_of(batch, batch_idx)",
        "opt.zero_grad()",
        "self.manual_backward(loss)",
        f'self.clip_gradients(opt, gradient_clip_val=0.1, gradient_clip_algorithm="{kind}")',
        "opt.step()",
        "return loss",
    )


@feature("accumulation by hand", slot="step", gives=[MANUAL, "accumulates", "by hand"])
def _(draft: Draft, random: Random) -> None:
    _manual(
        draft,
        "opt = self.optimizers()",
        "loss = self.loss_of(batch, batch_idx)",
        "self.manual_backward(loss / 2)",
        "if batch_idx % 2 == 1:",
        "    opt.step()",
        "    opt.zero_grad()",
        "return loss",
    )


@feature(
    "two halves of a batch by hand",
    slot="step",
    gives=[MANUAL, "accumulates"],
    # Halves of a rank's samples are other ones than those of all.
    conflicts=["batch", "of whole batch", "spectral norm in blocks", "uneven", "logs"],
)
def _(draft: Draft, random: Random) -> None:
    _manual(
        draft,
        "opt = self.optimizers()",
        "opt.zero_grad()",
        "halves = [[t[part::2] for t in batch] for part in range(2)]",
        "losses = [self.loss_of(half, batch_idx) for half in halves]",
        "for loss in losses:",
        "    self.manual_backward(loss / 2)",
        "opt.step()",
        "return sum(losses).detach() / 2",
    )


@feature(
    "adversary",
    slot="step",
    gives=[MANUAL, "several optimizers"],
    conflicts=["optimizer", "schedule"],
)
def _(draft: Draft, random: Random) -> None:
    draft.late_init.append(
        "self.critic = nn.Sequential(nn.Linear(OUT, 6), nn.ReLU(), nn.Linear(6, 1))"
    )
    kind = random.choice(
        ["torch.optim.SGD({}, lr=0.05)", "torch.optim.Adam({}, lr=0.01, eps=1e-3)"]
    )
    draft.params = "[p for n, p in self.named_parameters() if not n.startswith('critic')]"
    draft.optimizer = kind.format("params")
    draft.configured = [f"return optimizer, {kind.format('list(self.critic.parameters())')}"]
    toggles = random.choice([True, False])
    toggle = ["self.toggle_optimizer({})"] if toggles else []
    untoggle = ["self.untoggle_optimizer({})"] if toggles else []
    _manual(
        draft,
        "x, y, *_ = self.unpack(batch)",
        "first, second = self.optimizers()",
        *(line.format("first") for line in toggle),
        "fake = self(x, batch_idx)",
        "loss = self.loss_of(batch, batch_idx) + 0.1 * F.softplus(-self.critic(fake)).mean()",
        "first.zero_grad()",
        "self.manual_backward(loss)",
        "first.step()",
        *(line.format("first") for line in untoggle),
        *(line.format("second") for line in toggle),
        "real = torch.randn(OUT, generator=torch.Generator().manual_seed(3), dtype=DTYPE)",
        "judged = F.softplus(self.critic(fake.detach())).mean()",
        "judged = judged + F.softplus(-self.critic(real)).mean()",
        "second.zero_grad()",
        "self.manual_backward(judged)",
        "second.step()",
        *(line.format("second") for line in untoggle),
        "return loss.detach() + judged.detach()",
    )


@feature("step left out", slot="step", gives=["skips"])
def _(draft: Draft, random: Random) -> None:
    draft.skips = True
    draft.step = ["if batch_idx == 1:", "    return None", "return self.loss_of(batch, batch_idx)"]


@feature("step by a closure of one's own", slot="stepping", conflicts=[MANUAL])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None)",
        "optimizer.step(closure=optimizer_closure)",
    )


@feature(
    "every second step left out",
    slot="stepping",
    gives=["skips steps"],
    conflicts=[MANUAL, "accumulates"],
)
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None)",
        "if batch_idx % 2 == 0:",
        "    optimizer.step(closure=optimizer_closure)",
        "else:",
        "    optimizer_closure()",
    )


@feature("warm-up in optimizer_step", slot="stepping", conflicts=[MANUAL, "schedule"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None)",
        "for group in optimizer.param_groups:",
        "    group['lr'] = 0.01 * min(self.trainer.global_step + 1, 3)",
        "optimizer.step(closure=optimizer_closure)",
    )


@feature("backward of one's own", slot="backward", conflicts=[MANUAL])
def _(draft: Draft, random: Random) -> None:
    draft.hook("backward(self, loss)", "(loss * 0.5).backward()")


# What is added to the loss.


@feature("penalty over parameters")
def _(draft: Draft, random: Random) -> None:
    power = random.choice(["p.pow(2).sum()", "p.abs().sum()", "p.norm()"])
    which = random.choice(
        ["self.parameters()", "(p for p in self.parameters() if p.requires_grad)"]
    )
    draft.terms.append(f"loss = loss + 1e-3 * sum({power} for p in {which})")
    if "abs" in power:
        # The gradient of an attention's key bias is rounding, and that bias of torch's begins at 0,
        # where the sign of rounding would become a gradient of full size.
        draft.late_init += [
            "for p in self.parameters():",
            "    if not p.data.any():",
            "        p.data.fill_(0.1)",
        ]


@feature("penalty over kept parameters")
def _(draft: Draft, random: Random) -> None:
    draft.hook("on_fit_start(self)", "self.kept = list(self.parameters())")
    power = random.choice(["p.pow(2).sum()", "p.norm()", "p.detach().norm() * loss"])
    draft.terms.append(f"loss = loss + 1e-3 * sum({power} for p in self.kept)")


@feature("penalty over matrices")
def _(draft: Draft, random: Random) -> None:
    draft.terms.append(
        "loss = loss + 1e-2 * sum(p.square().mean() for p in self.parameters() if p.ndim > 1)"
    )


@feature("penalty of the head", conflicts=["head"])
def _(draft: Draft, random: Random) -> None:
    draft.terms.append("loss = loss + 1e-2 * self.head.weight.square().sum()")


@feature("orthogonality", conflicts=["head"])
def _(draft: Draft, random: Random) -> None:
    draft.terms += [
        "gram = self.head.weight @ self.head.weight.T",
        "loss = loss + 1e-3 * (gram - torch.eye(OUT, dtype=gram.dtype)).square().sum()",
    ]


@feature(
    "gradient of the inputs",
    gives=["second order"],
    conflicts=["tokens", "classes", "checkpointed", "recurrent"],
    needs=[],
)
def _(draft: Draft, random: Random) -> None:
    draft.terms += [
        "x = self.unpack(batch)[0]",
        "if x.is_floating_point():",
        "    x = x.detach().clone().requires_grad_()",
        "    out = self(x, batch_idx)",
        "    slope, = torch.autograd.grad(out.square().sum(), x, create_graph=True)",
        "    loss = loss + 1e-2 * slope.square().flatten(1).sum(1).mean()",
    ]


@feature("second forward without gradients", gives=["two forwards"])
def _(draft: Draft, random: Random) -> None:
    draft.terms += [
        "x = self.unpack(batch)[0]",
        "with torch.no_grad():",
        "    target = self(x, batch_idx)",
        "loss = loss + 0.1 * (self(x, batch_idx + 1) - 0.9 * target).square().mean()",
    ]


@feature("two views", gives=["two forwards"])
def _(draft: Draft, random: Random) -> None:
    draft.terms += [
        "x = self.unpack(batch)[0]",
        "if x.is_floating_point():",
        "    loss = loss + 0.1 * (self(x, batch_idx) - self(0.9 * x, batch_idx)).square().mean()",
    ]


@feature("teacher", slot="teacher", gives=["copies", "two forwards"])
def _(draft: Draft, random: Random) -> None:
    draft.late_init += [
        "self.teacher = copy.deepcopy(self.stem)",
        "for p in self.teacher.parameters():",
        "    p.requires_grad_(False)",
        "self.student = nn.Linear(WIDTH, WIDTH)",
    ]
    draft.terms += [
        "x = self.unpack(batch)[0]",
        "if isinstance(self.stem, nn.Linear):",
        "    with torch.no_grad():",
        "        taught = self.teacher(x)",
        "    loss = loss + 0.1 * (self.student(self.stem(x)) - taught).square().mean()",
    ]
    at = random.choice(
        [
            "on_train_batch_end(self, outputs, batch, batch_idx)",
            "on_train_batch_start(self, batch, batch_idx)",
        ]
    )
    update = random.choice(
        ["t.mul_(0.9).add_(p, alpha=0.1)", "t.lerp_(p, 0.1)", "t.copy_(0.9 * t + 0.1 * p)"]
    )
    draft.hook(
        at,
        "with torch.no_grad():",
        "    for t, p in zip(self.teacher.parameters(), self.stem.parameters()):",
        f"        {update}",
    )


@feature("deep-copied model", slot="teacher", gives=["copies", "two forwards"])
def _(draft: Draft, random: Random) -> None:
    draft.late_init.append(
        "self.average = copy.deepcopy(self.blocks if self.blocks is not None else self.a)"
    )
    draft.late_init.append("self.average.requires_grad_(False)")
    draft.hook(
        "on_train_batch_end(self, outputs, batch, batch_idx)",
        "source = self.blocks if self.blocks is not None else self.a",
        "with torch.no_grad():",
        "    for a, p in zip(self.average.parameters(), source.parameters()):",
        "        a.mul_(0.5).add_(p, alpha=0.5)",
    )


@feature("weight by the count of steps")
def _(draft: Draft, random: Random) -> None:
    draft.terms.append("loss = loss * (1 + 0.1 * self.global_step)")


@feature("weight by the epoch")
def _(draft: Draft, random: Random) -> None:
    draft.terms.append("loss = loss / (1 + self.current_epoch)")


@feature("loss of hidden states", conflicts=["sequential", "block"])
def _(draft: Draft, random: Random) -> None:
    draft.blocks = [
        "self.hidden = []",
        "for block in self.blocks:",
        "    h = block(h)",
        "    self.hidden.append(h)",
    ]
    draft.terms.append("loss = loss + 1e-2 * sum(h.square().mean() for h in self.hidden)")


@feature("mean over ranks in the step", gives=["of whole batch"])
def _(draft: Draft, random: Random) -> None:
    draft.terms += [
        "x = self.unpack(batch)[0]",
        "mean = self.all_gather(x.double().mean()).mean()",
        "loss = loss * (1 + 0.1 * mean.tanh())",
    ]
