"""Features: the structure of batches, targets and losses."""

from random import Random

from tests.fuzz.features import Draft, feature


@feature("batch in a dict", slot="batch")
def _(draft: Draft, random: Random) -> None:
    draft.sample = "dict({pairs})"
    draft.unpack = '{names}, = (batch[key] for key in "{names}".split(", "))'


@feature("batch in a nested dict", slot="batch")
def _(draft: Draft, random: Random) -> None:
    draft.sample = '{{"inputs": {{"x": x}}, "rest": [dict({pairs})]}}'
    draft.unpack = '{names}, = (batch["rest"][0][key] for key in "{names}".split(", "))'


@feature("batch in a named tuple", slot="batch", order=5)
def _(draft: Draft, random: Random) -> None:
    draft.classes["Batch"] = "class Batch(NamedTuple):\n    first: torch.Tensor\n    rest: tuple\n"
    draft.sample = "Batch(x, ({names},))"
    draft.unpack = "{names}, = batch.rest"


@feature("batch with strings", slot="batch")
def _(draft: Draft, random: Random) -> None:
    draft.sample = '({names}, f"sample {{index}}", index)'
    draft.unpack = "{names}, _, _ = batch"


@feature("batch as a list of samples", slot="batch", gives=["list batch"])
def _(draft: Draft, random: Random) -> None:
    draft.collate = "def collate(samples):\n    return samples\n"
    draft.unpack = "{names}, = (torch.stack(parts) for parts in zip(*batch))"


@feature("batch with a number beside", slot="batch")
def _(draft: Draft, random: Random) -> None:
    draft.collate = (
        "def collate(samples):\n"
        "    from torch.utils.data import default_collate\n"
        "    return default_collate(samples), 0.5, None\n"
    )
    draft.unpack = "{names}, = batch[0]"


@feature("ragged batch", slot="batch", gives=["list batch"], conflicts=["stem"])
def _(draft: Draft, random: Random) -> None:
    draft.fields["x"] = "torch.randn(1 + index % 3, WIDTH, generator=g, dtype=DTYPE)"
    draft.collate = (
        "def collate(samples):\n"
        "    from torch.utils.data import default_collate\n"
        "    rest = default_collate([sample[1:] for sample in samples])\n"
        "    return [[sample[0] for sample in samples], *rest]\n"
    )
    draft.unpack = "{names}, = [torch.stack([part.mean(0) for part in batch[0]]), *batch[1:]]"


@feature("padded batch", slot="batch", conflicts=["stem"])
def _(draft: Draft, random: Random) -> None:
    draft.fields["x"] = "torch.randn(LENGTH, WIDTH, generator=g, dtype=DTYPE)"
    draft.fields["valid"] = "torch.arange(LENGTH) < 1 + index % LENGTH"
    draft.sample = "dict({pairs})"
    draft.unpack = (
        '{names}, = (batch[key] for key in "{names}".split(", "))\n'
        "valid = valid.unsqueeze(-1).to(x.dtype)\n"
        "x = (x * valid).sum(1) / valid.sum(1)"
    )


@feature("weights of samples", slot="loss")
def _(draft: Draft, random: Random) -> None:
    draft.fields["w"] = "torch.rand((), generator=g, dtype=DTYPE)"
    draft.loss = "(w * (out - y).square().flatten(1).mean(1)).mean()"


@feature("masked targets", slot="loss")
def _(draft: Draft, random: Random) -> None:
    draft.fields["m"] = "torch.arange(OUT) % 3 != index % 3"
    draft.loss = "((out - y).square() * (m if out.dim() == 2 else m[:, None])).mean()"


@feature("cross entropy", slot="loss", gives=["classes"])
def _(draft: Draft, random: Random) -> None:
    draft.classes_as_targets = True
    smooth = random.choice(["", ", label_smoothing=0.1"])
    draft.loss = f"F.cross_entropy(out.flatten(0, -2), y.flatten(){smooth})"


@feature("log-likelihood", slot="loss", gives=["classes"])
def _(draft: Draft, random: Random) -> None:
    draft.classes_as_targets = True
    draft.loss = "-out.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean()"


@feature("smooth distance", slot="loss")
def _(draft: Draft, random: Random) -> None:
    draft.loss = random.choice(
        [
            "F.smooth_l1_loss(out, y)",
            "F.huber_loss(out, y, delta=0.5)",
            "(out - y).abs().pow(1.5).mean()",
        ]
    )


@feature("cosine distance", slot="loss")
def _(draft: Draft, random: Random) -> None:
    draft.loss = "1 - F.cosine_similarity(out, y, dim=-1).mean()"


@feature("loss per sample, then mean", slot="loss")
def _(draft: Draft, random: Random) -> None:
    draft.loss = "torch.stack([F.mse_loss(o, t) for o, t in zip(out, y)]).mean()"


@feature("uneven end", gives=["uneven"])
def _(draft: Draft, random: Random) -> None:
    draft.num_samples = 28


@feature("weight by index", slot="loss")
def _(draft: Draft, random: Random) -> None:
    draft.fields["i"] = "torch.tensor(index)"
    draft.loss = "((out - y).square().flatten(1).mean(1) * (1 + (i % 2).to(out.dtype))).mean()"
