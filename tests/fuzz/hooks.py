"""Features: hooks that read and edit weights and gradients."""

from random import Random

from tests.fuzz.features import Draft, feature

BEFORE = "on_before_optimizer_step(self, optimizer)"
AFTER = "on_after_backward(self)"
BATCH_START = "on_train_batch_start(self, batch, batch_idx)"
BATCH_END = "on_train_batch_end(self, outputs, batch, batch_idx)"
EPOCH_END = "on_train_epoch_end(self)"
EDITS = "edits weights"
READS_GRADS = "reads gradients"
EDITS_GRADS = "edits gradients"


@feature("clipping by hand", gives=[EDITS_GRADS, "nonlinear", READS_GRADS])
def _(draft: Draft, random: Random) -> None:
    how = random.choice(
        [
            "torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)",
            "torch.nn.utils.clip_grad_value_(self.parameters(), 0.02)",
        ]
    )
    # torch takes no list without gradients, as of a step that is left out
    draft.hook(BEFORE, "if any(p.grad is not None for p in self.parameters()):", f"    {how}")


@feature("clipping hook", slot="clipping", gives=["nonlinear"], conflicts=["manual"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "configure_gradient_clipping(self, optimizer, *_, **__)",
        'self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")',
    )


@feature("norm of gradients", gives=[READS_GRADS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BEFORE,
        "norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]",
        "note(self, 'norm of gradients', torch.stack(norms).norm())",
    )


@feature("norms by Lightning", gives=[READS_GRADS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BEFORE,
        "from lightning.pytorch.utilities import grad_norm",
        "for name, value in grad_norm(self, norm_type=2).items():",
        "    note(self, name, value)",
    )


@feature("which gradients are there", gives=[READS_GRADS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BEFORE,
        "for name, p in self.named_parameters():",
        "    note(self, f'{name} has a gradient', p.grad is not None)",
        "    note(self, f'{name} is trained', p.requires_grad)",
    )


@feature("average of weights by hand", gives=["averages"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BATCH_END,
        "with torch.no_grad():",
        "    if not hasattr(self, 'averaged'):",
        "        self.averaged = {n: p.detach().clone() for n, p in self.named_parameters()}",
        "    for n, p in self.named_parameters():",
        "        self.averaged[n].mul_(0.5).add_(p.detach(), alpha=0.5)",
        "    for n, value in self.averaged.items():",
        "        note(self, f'average of {n}', value.norm())",
    )


@feature("clamped weights", gives=[EDITS])
def _(draft: Draft, random: Random) -> None:
    at = random.choice([BATCH_END, BATCH_START])
    draft.hook(
        at,
        "with torch.no_grad():",
        "    for p in self.parameters():",
        "        p.clamp_(-0.3, 0.3)",
    )


@feature("clamped data", gives=[EDITS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(BATCH_END, "for p in self.parameters():", "    p.data.clamp_(-0.3, 0.3)")


@feature("normalised rows", gives=[EDITS, "reads weights"], conflicts=["head"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BATCH_END,
        "with torch.no_grad():",
        "    self.head.weight.div_(self.head.weight.norm(dim=1, keepdim=True) + 0.1)",
    )


@feature("decay by hand", gives=[EDITS])
def _(draft: Draft, random: Random) -> None:
    at = random.choice([BATCH_START, BEFORE])
    draft.hook(
        at, "with torch.no_grad():", "    for p in self.parameters():", "        p.mul_(0.99)"
    )


@feature("assigned data", gives=[EDITS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(BATCH_END, "for p in self.parameters():", "    p.data = p.data * 0.99")


@feature("one row set to zero", gives=[EDITS, "by index"], conflicts=["head"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(BATCH_END, "with torch.no_grad():", "    self.head.weight[0].zero_()")


@feature("frozen in mid-run", slot="freezing", gives=["freezes"])
def _(draft: Draft, random: Random) -> None:
    part = random.choice(["self.stem", "self.head", "self"])
    which = "list(self.parameters())[::3]" if part == "self" else f"{part}.parameters()"
    if part == "self.head":
        which = "(self.head or self.stem).parameters()"
    draft.hook(
        BATCH_START,
        "if self.global_step == 2:",
        f"    for p in {which}:",
        "        p.requires_grad_(False)",
    )


@feature("thawed in mid-run", slot="freezing", gives=["freezes", "frozen"])
def _(draft: Draft, random: Random) -> None:
    which = "list(self.parameters())[:2]"
    draft.late_init += [f"for p in {which}:", "    p.requires_grad_(False)"]
    draft.hook(
        BATCH_START,
        "if self.global_step == 2:",
        f"    for p in {which}:",
        "        p.requires_grad_(True)",
    )


@feature("frozen by turns", slot="freezing", gives=["freezes"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BATCH_START,
        "for p in list(self.parameters())[-2:]:",
        "    p.requires_grad_(batch_idx % 2 == 0)",
    )


@feature("gradients set to zero", gives=["zero grad kept"], conflicts=["manual"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "optimizer_zero_grad(self, epoch, batch_idx, optimizer)",
        "optimizer.zero_grad(set_to_none=False)",
    )


@feature("gradients scaled after backward", gives=[EDITS_GRADS], conflicts=["accumulates"])
def _(draft: Draft, random: Random) -> None:
    edit = random.choice(
        ["p.grad.mul_(0.5)", "p.grad *= 0.5", "p.grad.data.mul_(0.5)", "p.grad.div_(2)"]
    )
    draft.hook(
        AFTER, "for p in self.parameters():", "    if p.grad is not None:", f"        {edit}"
    )


@feature("gradients assigned after backward", gives=[EDITS_GRADS], conflicts=["accumulates"])
def _(draft: Draft, random: Random) -> None:
    edit = random.choice(["p.grad * 0.5", "p.grad.clone() * 0.5", "p.grad / 2", "0.5 * p.grad + 0"])
    draft.hook(
        AFTER,
        "for p in self.parameters():",
        "    if p.grad is not None:",
        f"        p.grad = {edit}",
    )


@feature("gradients kept and set again", gives=[EDITS_GRADS], conflicts=["accumulates"])
def _(draft: Draft, random: Random) -> None:
    scale = random.choice(["0.5", "torch.tensor(0.5, dtype=DTYPE)"])
    draft.hook(
        AFTER,
        "kept = {p: p.grad.clone() for p in self.parameters() if p.grad is not None}",
        "self.zero_grad()",
        "for p, g in kept.items():",
        f"    p.grad = g * {scale}",
    )


@feature("gradients of matrices centred", gives=[EDITS_GRADS, READS_GRADS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BEFORE,
        "for p in self.parameters():",
        "    if p.grad is not None and p.ndim > 1:",
        "        p.grad.sub_(p.grad.mean())",
    )


@feature("gradients normalised", gives=[EDITS_GRADS, READS_GRADS, "nonlinear"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BEFORE,
        "for p in self.parameters():",
        "    if p.grad is not None:",
        "        p.grad.div_(p.grad.norm() + 1.0)",
    )


@feature("weights added to gradients", gives=[EDITS_GRADS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BEFORE,
        "for p in self.parameters():",
        "    if p.grad is not None:",
        "        p.grad.add_(p.detach(), alpha=0.1)",
    )


@feature("some gradients taken away", gives=[EDITS_GRADS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BEFORE,
        "for number, p in enumerate(self.parameters()):",
        "    if number % 3 == self.global_step % 3:",
        "        p.grad = None",
    )


@feature("gradient hook of a parameter", gives=[EDITS_GRADS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "on_fit_start(self)",
        "for p in list(self.parameters())[-2:]:",
        "    if p.requires_grad:",
        "        p.register_hook(lambda g: g * 0.5)",
    )


@feature("histograms", gives=["reads weights"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BATCH_END,
        "for name, p in self.named_parameters():",
        "    counts = torch.histc(p.detach().float(), bins=4, min=-1, max=1)",
        "    note(self, f'histogram of {name}', counts @ torch.arange(4.0))",
    )


@feature("norms of weights", gives=["reads weights"])
def _(draft: Draft, random: Random) -> None:
    at = random.choice([BATCH_START, BATCH_END, BEFORE, EPOCH_END])
    value = random.choice(
        ["p.norm()", "p.detach().abs().max()", "p.data.mean()", "p.square().sum().item()"]
    )
    draft.hook(
        at,
        "for name, p in self.named_parameters():",
        f"    note(self, f'norm of {{name}}', {value})",
    )


@feature("state read in a hook", gives=["reads weights"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        random.choice([BATCH_END, EPOCH_END]),
        "for name, value in self.state_dict().items():",
        "    note(self, f'state {name}', value.double().norm())",
    )


@feature("earlier state loaded in a hook", gives=[EDITS, "by attributes"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BATCH_END,
        "if batch_idx == 0:",
        "    self.earlier = copy.deepcopy(self.state_dict())",
        "if batch_idx == 2:",
        "    self.load_state_dict(self.earlier)",
    )


@feature("state kept on the CPU and loaded", gives=[EDITS, "by attributes"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BATCH_END,
        "if batch_idx == 1:",
        "    self.earlier = {k: v.detach().cpu().clone() for k, v in self.state_dict().items()}",
        "if batch_idx == 3:",
        "    self.load_state_dict(self.earlier)",
    )


@feature("layer initialised anew", gives=[EDITS], conflicts=["head"])
def _(draft: Draft, random: Random) -> None:
    how = random.choice(
        [
            "nn.init.constant_(self.head.weight, 0.1)",
            "self.head.weight.copy_(torch.linspace(-1, 1, OUT * WIDTH).view(OUT, WIDTH))",
            "self.head.weight.data.fill_(0.1)",
        ]
    )
    draft.hook(BATCH_END, "if batch_idx == 1:", "    with torch.no_grad():", f"        {how}")


@feature("rate changed in a hook", conflicts=["schedule", "warm-up in optimizer_step", "manual"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        random.choice([BATCH_START, BATCH_END]),
        "for group in self.trainer.optimizers[0].param_groups:",
        "    group['lr'] = group['lr'] * 0.8",
    )


@feature("weights swapped for validation", gives=[EDITS, "averages"], needs=["validates"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "on_validation_start(self)",
        "with torch.no_grad():",
        "    self.kept = [p.detach().clone() for p in self.parameters()]",
        "    for p in self.parameters():",
        "        p.mul_(0.5)",
    )
    draft.hook(
        "on_validation_end(self)",
        "with torch.no_grad():",
        "    for p, kept in zip(self.parameters(), self.kept):",
        "        p.copy_(kept)",
    )


@feature("hooks that look at modules", gives=["module hooks"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "on_fit_start(self)",
        "def keep(module, inputs, output):",
        "    self.activation = output.detach()",
        "if isinstance(self.head, nn.Linear):",
        "    self.head.register_forward_hook(keep)",
    )


@feature("weights edited at the start", gives=[EDITS, "at the start"])
def _(draft: Draft, random: Random) -> None:
    at = random.choice(["on_fit_start(self)", "on_train_start(self)", "on_train_epoch_start(self)"])
    draft.hook(
        at, "with torch.no_grad():", "    for p in self.parameters():", "        p.mul_(0.9)"
    )


@feature("dot product of weights and gradients", gives=[READS_GRADS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BEFORE,
        "products = [(p.detach() * p.grad).sum() for p in self.parameters() if p.grad is not None]",
        "note(self, 'products', sum(products))",
    )


@feature("decides by shapes", gives=[READS_GRADS])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BEFORE,
        "matrices = [p for p in self.parameters() if p.ndim > 1 and p.grad is not None]",
        "note(self, 'matrices', len(matrices))",
        "note(self, 'elements', sum(p.numel() for p in self.parameters()))",
        "note(self, 'rows', sum(p.shape[0] for p in matrices))",
    )


@feature("weights applied in a hook", gives=["reads weights"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        BATCH_END,
        "norms = []",
        "def look(module):",
        "    if isinstance(getattr(module, 'weight', None), torch.Tensor):",
        "        norms.append(module.weight.detach().norm())",
        "self.apply(look)",
        "note(self, 'weights of layers', sum(norms))",
    )
