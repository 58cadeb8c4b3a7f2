"""From features and a seed to the source of a script that stands alone.

The script has a module, its data and `run(strategy, devices, folder)`, which trains and returns
everything that is to be compared, by name. It is what runs and what is printed: run alone it
compares one device with a strategy. The same features and seed give the same script.
"""

from collections.abc import Sequence
from random import Random
from textwrap import indent

from tests.fuzz.features import BLOCK, FEATURES, Draft, Lines

BEGIN = '''"""A program of the features: {features}.

Seed {seed}. Run alone it prints where training under `STRATEGY` is first not that of one device.
"""

import copy
import itertools
import logging
import os
import sys
import tempfile
import warnings
from typing import NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.utils.checkpoint import checkpoint

from lightning_shard import *
from lightning_shard.data_parallel.compression import TopK

WIDTH, OUT, LENGTH, HEADS, BATCH = {width}, {outputs}, 8, 4, 8
DTYPE = {dtype}
NOTES = {{}}  # by rank what it has noted: a name, a value, and whether the mean of ranks counts
PROGRESS = {{"steps": 0}}
SKIPS = {skips}  # then a pipeline gives a loss of 0, others none


def note(module, name, value, mean=False):
    """Keep a number of this rank's, to be compared."""
    rank = getattr(module.trainer.strategy, "mesh_rank", 0)
    if not getattr(module, "is_over", False):
        NOTES.setdefault(rank, []).append((name, float(value), mean))

'''

HARNESS = '''

class Noted(Callback):
    """Notes each batch's loss on each rank."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        PROGRESS["steps"] = max(PROGRESS["steps"], trainer.global_step)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and (loss != 0 or not SKIPS):
            note(pl_module, "loss", loss, mean=True)


def noted():
    """Return the notes of all ranks, in the order in which they came."""
    values = {}
    for place, entries in enumerate(itertools.zip_longest(*NOTES.values())):
        names = [entry and entry[0] for entry in entries]
        assert len(set(names)) == 1, f"ranks noted {names} at {place}"
        numbers = torch.tensor([entry[1] for entry in entries], dtype=torch.float64)
        values[f"note {place}: {names[0]}"] = numbers.mean() if entries[0][2] else numbers[0]
        if not entries[0][2]:
            spread = numbers.max() - numbers.min()
            values[f"note {place}: {names[0]}, spread over ranks"] = spread
    return values


def found(trainer, net, **more):
    """Return by name what this run has left, in the order in which it came."""
    values = noted()
    for name, value in net.state_dict().items():
        values[f"weight {name}"] = value
    for place, optimizer in enumerate(trainer.optimizers):
        state = optimizer.state_dict()
        for number, group in enumerate(state["param_groups"]):
            values[f"optimizer {place}, group {number}: lr"] = group["lr"]
        for index, entry in sorted(state["state"].items()):
            for key, value in entry.items():
                if isinstance(value, (torch.Tensor, int, float)):
                    values[f"optimizer {place}, parameter {index}: {key}"] = value
    for name, value in trainer.callback_metrics.items():
        values[f"metric {name}"] = value
    values["steps"] = trainer.global_step
    values.update(more)
    tensors = {name: torch.as_tensor(value) for name, value in values.items()}
    return {name: value.detach().clone().double() for name, value in tensors.items()}


'''

END = """

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    one = run("auto", 1, tempfile.mkdtemp())
    other = run(STRATEGY, DEVICES, tempfile.mkdtemp())
    for name in [*one, *(name for name in other if name not in one)]:
        if name not in one or name not in other:
            print(f"{name}: only {'on one device' if name in one else 'on ranks'}")
        elif one[name].shape != other[name].shape:
            print(f"{name}: {tuple(one[name].shape)}, on ranks {tuple(other[name].shape)}")
        elif one[name].numel():
            apart = (one[name] - other[name]).abs().max().item()
            print(f"{name}: apart by {apart:.1e}" if apart > 1e-8 else f"{name}: equal")
"""


def program(features: Sequence[str], seed: int, strategy: str = '"auto"', devices: int = 1) -> str:
    """Return the source of the program; the strategy is that of the script's own run."""
    draft = Draft()
    for one in sorted(map(FEATURES.__getitem__, features), key=lambda one: (one.order, one.name)):
        one.write(draft, Random(f"{one.name} of {seed}"))
    draft.classes.setdefault("Block", BLOCK)
    begin = BEGIN.format(
        features=", ".join(features) or "none",
        seed=seed,
        dtype=draft.dtype,
        width=draft.width,
        outputs=draft.num_outputs,
        skips=draft.skips,
    )
    return "\n".join(
        (
            begin,
            *(source.strip("\n") + "\n\n" for source in draft.classes.values()),
            _module(draft),
            _data(draft),
            HARNESS,
            _run(draft),
            f"\ndef STRATEGY():\n    return {strategy}\n\n\nDEVICES = {devices}\n",
            END,
        )
    )


def _body(lines: Lines, depth: int) -> str:
    return indent("\n".join(lines), "    " * depth)


def _method(signature: str, lines: Lines) -> str:
    return f"\n    def {signature}:\n{_body(lines or ['pass'], 2)}\n"


def _logged(name: str) -> Lines:
    """Log a loss as of so many samples, which Lightning cannot tell of a batch of lists."""
    return [
        "size = len(self.unpack(batch)[1])",
        f'self.log("{name}", self.plain_loss(batch, batch_idx), batch_size=size, sync_dist=True)',
    ]


def _fields(draft: Draft) -> dict[str, str]:
    """Return by name the source of one sample's fields, of `g` and `index`."""
    fields = {"x": "torch.randn(WIDTH, generator=g, dtype=DTYPE)"}
    shape = "LENGTH, " if draft.sequence else ""
    if draft.classes_as_targets:
        fields["y"] = f"torch.randint(0, OUT, ({shape}), generator=g)"
    else:
        fields["y"] = f"torch.randn({shape}OUT, generator=g, dtype=DTYPE)"
    return fields | draft.fields


def _module(draft: Draft) -> str:
    names = ", ".join(_fields(draft))
    init = [
        "super().__init__()",
        "torch.manual_seed(7)",
        *draft.init,
        f"self.stem = {draft.make_stem}",
        f"self.blocks = {draft.make_blocks}",
        f"self.head = {draft.make_head}",
        *draft.late_init,
        "self.to(DTYPE)",
    ]
    forward = draft.stem + draft.before_blocks + draft.blocks + draft.after_blocks + draft.head
    plain = [f"{names} = self.unpack(batch)", "out = self(x, batch_idx)", f"return {draft.loss}"]
    of_step = ["loss = self.plain_loss(batch, batch_idx)", *draft.terms, "return loss"]
    methods = {
        "__init__(self)": init,
        "forward(self, x, batch_idx=0)": forward,
        "unpack(self, batch)": [draft.unpack.format(names=names), f"return {names}"],
        "plain_loss(self, batch, batch_idx)": plain,
        "loss_of(self, batch, batch_idx)": of_step,
        "training_step(self, batch, batch_idx)": draft.step,
        "configure_optimizers(self)": [
            f"params = {draft.params}",
            f"optimizer = {draft.optimizer}",
            *draft.configured,
        ],
    }
    if draft.validates:
        methods["validation_step(self, batch, batch_idx, dataloader_idx=0)"] = _logged("val_loss")
    methods["test_step(self, batch, batch_idx)"] = _logged("test_loss")
    methods["predict_step(self, batch, batch_idx)"] = ["return self(self.unpack(batch)[0])"]
    written = [_method(signature, lines) for signature, lines in methods.items()]
    written += [_method(signature, lines) for signature, lines in draft.hooks.items()]
    written += ["\n" + indent(source.strip("\n"), "    ") for source in draft.methods.values()]
    return "class Net(L.LightningModule):" + "".join(written)


DATA = '''

class Samples(Dataset):
    """Samples that follow from their numbers."""

    def __init__(self, count, first=0):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(1000 + self.first + index)
{made}
        return {sample}


class Data(L.LightningDataModule):
    """The same samples in each global batch, however many ranks there are."""

    def parts(self):
        place = self.trainer.distributed_sampler_kwargs or {{"num_replicas": 1, "rank": 0}}
        return place, BATCH // place["num_replicas"]

    def of_training(self, count={count}, first=0):
        place, size = self.parts()
        samples = Samples(count, first)
        sampler = DistributedSampler(samples, **place, shuffle=False)
        return DataLoader(samples, batch_size=size, sampler=sampler, collate_fn=collate)

    def train_dataloader(self):
        return {train_loaders}

    def held_out(self, count=16, first=500):
        return DataLoader(Samples(count, first), batch_size=self.parts()[1], collate_fn=collate)

    def test_dataloader(self):
        return self.held_out()

    def predict_dataloader(self):
        return self.held_out({num_predicted})
'''

VALIDATION = """
    def val_dataloader(self):
        return {loaders}
"""


def _data(draft: Draft) -> str:
    fields = _fields(draft)
    made = [f"{name} = {source}" for name, source in fields.items()]
    names = ", ".join(fields)
    sample = draft.sample.format(names=names, pairs=", ".join(f"{one}={one}" for one in fields))
    source = DATA.format(
        made=_body(made, 2),
        sample=sample,
        count=draft.num_samples,
        num_predicted=draft.num_predicted,
        train_loaders=draft.train_loaders,
    )
    if draft.validates:
        source += VALIDATION.format(loaders=draft.loaders)
    return f"\n\n{draft.collate}\n{source}"


def _run(draft: Draft) -> str:
    options = ", ".join(f"{name}={value}" for name, value in draft.trainer.items())
    callbacks = "".join(f", {one}" for one in draft.callbacks)
    saves = any("Checkpoint" in one for one in draft.callbacks)
    return f'''def trainer_for(strategy, devices, folder, callbacks=(), **options):
    """Return a quiet Trainer."""
    given = dict(
        accelerator="cpu", strategy=strategy, devices=devices, default_root_dir=folder,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, enable_checkpointing={saves},
    )
    given |= dict({options})
    callbacks = [Noted(){callbacks}, *callbacks]
    return L.Trainer(**given | options, callbacks=callbacks)


def run(strategy="auto", devices=1, folder="."):
    """Train, and return what is to be compared by name; a function makes the strategy anew."""
    NOTES.clear()
    PROGRESS["steps"] = 0
    L.seed_everything(0, verbose=False)
    made = strategy if callable(strategy) else lambda: strategy
    more = {{}}
    net, data = Net(), Data()
    trainer = trainer_for(made(), devices, folder)
{_body(draft.fit, 1)}
{_body(draft.entries, 1)}
    return found(trainer, net, **more)
'''
