"""Features: the Trainer's options, callbacks, loaders, and what is done besides one fit."""

from random import Random

from tests.fuzz.features import Draft, feature


@feature("two epochs", slot="epochs", gives=["epochs"])
def _(draft: Draft, random: Random) -> None:
    draft.trainer["max_epochs"] = "2"
    draft.num_samples = min(draft.num_samples, 24)


@feature(
    "accumulated gradients",
    slot="accumulation",
    gives=["accumulates", "by trainer"],
    conflicts=["manual"],
)
def _(draft: Draft, random: Random) -> None:
    draft.trainer["accumulate_grad_batches"] = str(random.choice([2, 3]))


@feature(
    "accumulation that changes",
    slot="accumulation",
    gives=["accumulates", "by trainer"],
    needs=["epochs"],
    conflicts=["manual"],
)
def _(draft: Draft, random: Random) -> None:
    draft.callbacks.append("GradientAccumulationScheduler({1: 2})")


@feature("clipped norm", slot="clipping", gives=["nonlinear"], conflicts=["manual"])
def _(draft: Draft, random: Random) -> None:
    draft.trainer["gradient_clip_val"] = "0.2"


@feature("clipped values", slot="clipping", gives=["nonlinear"], conflicts=["manual"])
def _(draft: Draft, random: Random) -> None:
    draft.trainer |= {"gradient_clip_val": "0.01", "gradient_clip_algorithm": '"value"'}


@feature("validation", slot="validation", gives=["validates"])
def _(draft: Draft, random: Random) -> None:
    draft.validates = True


@feature("validation within the epoch", slot="validation", gives=["validates"])
def _(draft: Draft, random: Random) -> None:
    draft.validates = True
    draft.trainer["val_check_interval"] = random.choice(["2", "0.5"])


@feature("sanity check", slot="sanity", needs=["validates"])
def _(draft: Draft, random: Random) -> None:
    draft.trainer["num_sanity_val_steps"] = "1"


@feature("several validation loaders", slot="loaders", needs=["validates"], conflicts=["monitors"])
def _(draft: Draft, random: Random) -> None:
    draft.loaders = "[self.held_out(), self.held_out(8, 700)]"


@feature("validation with a shorter last batch", slot="loaders", needs=["validates"])
def _(draft: Draft, random: Random) -> None:
    """Of as many samples for each rank: else some are repeated, as by Lightning."""
    draft.loaders = f"self.held_out({random.choice([12, 20])})"


@feature(
    "several training loaders",
    slot="step",
    gives=["several loaders"],
    conflicts=["logs", "resumed in mid-epoch", "uneven"],
)
def _(draft: Draft, random: Random) -> None:
    loaders = "self.of_training(), self.of_training(16, 300)"
    mode = random.choice(["min_size", "max_size", "max_size_cycle", "a dict"])
    draft.train_loaders = f'CombinedLoader([{loaders}], "{mode}")'
    if mode == "a dict":
        draft.train_loaders = f"dict(zip('ab', ({loaders})))"
    draft.classes["CombinedLoader"] = (
        "from lightning.pytorch.utilities.combined_loader import CombinedLoader"
    )
    draft.step = [
        "parts = batch.values() if isinstance(batch, dict) else batch",
        "losses = [self.loss_of(part, batch_idx) for part in parts if part is not None]",
        "return losses[0] + 0.5 * sum(losses[1:])",
    ]


@feature("limited batches", slot="limit")
def _(draft: Draft, random: Random) -> None:
    draft.trainer["limit_train_batches"] = "3"


@feature("limited steps", slot="limit", conflicts=["resumed"])
def _(draft: Draft, random: Random) -> None:
    draft.trainer["max_steps"] = "3"


@feature("gradients in validation", slot="inference", needs=["validates"])
def _(draft: Draft, random: Random) -> None:
    draft.trainer["inference_mode"] = "False"


@feature("double precision by the flag", slot="precision")
def _(draft: Draft, random: Random) -> None:
    draft.trainer["precision"] = '"64-true"'


@feature("early stopping", slot="stopping", gives=["monitors"], needs=["validates", "epochs"])
def _(draft: Draft, random: Random) -> None:
    draft.callbacks.append('EarlyStopping("val_loss", patience=1, min_delta=0.3)')


@feature("best checkpoint", slot="checkpoint", gives=["monitors"], needs=["validates"])
def _(draft: Draft, random: Random) -> None:
    draft.callbacks.append('ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)')


@feature("weight averaging", slot="averaging", gives=["averages", "averaging callback"])
def _(draft: Draft, random: Random) -> None:
    draft.callbacks.append(random.choice(["EMAWeightAveraging(decay=0.5)", "WeightAveraging()"]))


@feature(
    "stochastic weight averaging",
    slot="averaging",
    gives=["averages", "averaging callback"],
    needs=["epochs"],
    conflicts=["manual", "schedule", "several optimizers", "LBFGS!", "batch norm"],
)
def _(draft: Draft, random: Random) -> None:
    draft.callbacks.append("StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)")


@feature("rates monitored", slot="monitor", conflicts=["several optimizers"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "on_train_batch_end(self, outputs, batch, batch_idx)",
        "note(self, 'rate', self.trainer.optimizers[0].param_groups[0]['lr'])",
    )


@feature(
    "fine-tuning in two phases",
    slot="freezing",
    gives=["freezes", "frozen"],
    needs=["epochs"],
    conflicts=["stem", "optimizer", "groups", "several optimizers", "frozen", "schedule", "LBFGS!"],
)
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.backbone = nn.Linear(WIDTH, WIDTH)")
    draft.before_blocks.append("h = self.backbone(h)")
    draft.params = "[p for p in self.parameters() if p.requires_grad]"
    draft.callbacks.append("BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)")


@feature("test after the fit")
def _(draft: Draft, random: Random) -> None:
    draft.entries += [
        "tested = trainer_for(made(), devices, folder)",
        "more['test'] = tested.test(net, data, verbose=False)[0]['test_loss']",
    ]


@feature("test by the same trainer")
def _(draft: Draft, random: Random) -> None:
    draft.entries.append(
        "more['same test'] = trainer.test(net, data, verbose=False)[0]['test_loss']"
    )


@feature("prediction after the fit", gives=["predicts"])
def _(draft: Draft, random: Random) -> None:
    draft.entries += [
        "predicted = trainer_for(made(), devices, folder).predict(net, data)",
        "more['predictions'] = torch.cat(predicted)",
    ]


@feature("prediction of an uneven number of samples", gives=["predicts"])
def _(draft: Draft, random: Random) -> None:
    draft.num_predicted = random.choice([9, 13, 19])
    draft.entries += [
        "predicted = trainer_for(made(), devices, folder).predict(net, data)",
        "more['uneven predictions'] = torch.cat(predicted)",
    ]


@feature("validation before the fit", needs=["validates"], order=3)
def _(draft: Draft, random: Random) -> None:
    draft.fit.insert(
        0, "logged = trainer_for(made(), devices, folder).validate(net, data, verbose=False)[0]"
    )
    draft.fit.insert(1, "more['validated'] = next(iter(logged.values()))")


@feature("two fits", slot="resuming", gives=["resumed"], order=4)
def _(draft: Draft, random: Random) -> None:
    draft.fit += ["trainer = trainer_for(made(), devices, folder)", "trainer.fit(net, data)"]


@feature("resumed after an epoch", slot="resuming", gives=["resumed"], needs=["epochs"], order=4)
def _(draft: Draft, random: Random) -> None:
    draft.fit = [
        "trainer = trainer_for(made(), devices, folder, max_epochs=1)",
        "trainer.fit(net, data)",
        "trainer.save_checkpoint(f'{folder}/part.ckpt')",
        "net, data, trainer = Net(), Data(), trainer_for(made(), devices, folder)",
        "trainer.fit(net, data, ckpt_path=f'{folder}/part.ckpt')",
    ]


@feature(
    "resumed in mid-epoch",
    slot="resuming",
    gives=["resumed", "resumed in mid-epoch"],
    conflicts=[
        "limit",
        "logs",  # Lightning's mean of an epoch is of the batches since it was resumed
        "skips",
        "skips steps",
        "validates",
        "manual",
        "averages",
        "freezes",
        "by attributes",
        "at the start",
        "averaging callback",
        "stops",
    ],
    order=11,
)
def _(draft: Draft, random: Random) -> None:
    """One device begins the epoch's samples again, so there it is trained in one go.

    The end of the part's epoch is not one of that: what hooks note there is not compared.
    """
    draft.hook(
        "on_train_batch_end(self, outputs, batch, batch_idx)",
        "if PROGRESS.get('save') and self.global_step == 1:",
        "    self.trainer.save_checkpoint(PROGRESS['save'])",
        "    self.is_over = True",
    )
    draft.fit = [
        "if devices > 1:",
        "    PROGRESS['save'] = f'{folder}/part.ckpt'",
        "    trainer_for(made(), devices, folder, max_steps=1).fit(net, data)",
        "    net, data, PROGRESS['save'] = Net(), Data(), None",
        "trainer.fit(net, data, ckpt_path=f'{folder}/part.ckpt' if devices > 1 else None)",
    ]


@feature("own file of weights after the fit", order=6)
def _(draft: Draft, random: Random) -> None:
    draft.entries += [
        "trainer.save_checkpoint(f'{folder}/whole.ckpt')",
        "saved = torch.load(f'{folder}/whole.ckpt', weights_only=False)['state_dict']",
        "more |= {f'saved {name}': value for name, value in saved.items()}",
    ]


@feature("anomalies watched", slot="anomaly")
def _(draft: Draft, random: Random) -> None:
    draft.trainer["detect_anomaly"] = "True"


@feature("a hook that stops", gives=["stops"])
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "on_train_batch_end(self, outputs, batch, batch_idx)",
        "if batch_idx == 2:",
        "    self.trainer.should_stop = True",
    )


@feature("epoch ended early", order=9)
def _(draft: Draft, random: Random) -> None:
    draft.hook(
        "on_train_batch_start(self, batch, batch_idx)", "return -1 if batch_idx == 3 else None"
    )
