"""chemprop: message passing over the bonds of molecules."""

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.features.columns import GLOBAL_BATCH, Here
from tests.features.declared import by
from tests.features.network import Report, weights
from tests.zoo.foreign.batches import Batches, logged
from tests.zoo.foreign.declared import use
from tests.zoo.subjects import NUM_STEPS

SMILES = ("C", "CC", "CCO", "CCN", "CC(=O)O", "c1ccccc1", "CCCl", "C#N")
assert len(SMILES) == GLOBAL_BATCH


def _samples() -> Any:
    from chemprop import data

    points = [
        data.MoleculeDatapoint.from_smi(smiles, [float(number % 5)])
        for number, smiles in enumerate(SMILES * NUM_STEPS)
    ]
    return data.MoleculeDataset(points)


def _network() -> Any:
    from chemprop import models, nn

    torch.manual_seed(5)
    return models.MPNN(
        nn.BondMessagePassing(d_h=16, depth=2),
        nn.MeanAggregation(),
        nn.RegressionFFN(input_dim=16, hidden_dim=16, n_layers=2),
        warmup_epochs=0,
    )


@use(
    "chemprop",
    "MPNN",
    "fit, test and predict with one Trainer; `save_model`, `load_model`; `load_from_checkpoint`",
    refused=by("pipeline_parallel", "an index of 24 rows into 8 samples"),
)
def molecules(here: Here) -> Report:
    from chemprop.data import collate_batch
    from chemprop.models import load_model, save_model

    module = _network()
    data = Batches(here, _samples(), partial(DataLoader, collate_fn=collate_batch))
    trainer = here.trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(here.folder / "module.ckpt")
    save_model(here.folder / "module.pt", module)
    return {
        "weights": weights(module),
        "logged": logged(trainer),
        "tested": trainer.test(module, datamodule=data, verbose=False),
        "predicted": torch.cat(trainer.predict(module, datamodule=data)),
        "loaded": weights(load_model(here.folder / "module.pt")),
        "restored": weights(type(module).load_from_checkpoint(here.folder / "module.ckpt")),
    }
