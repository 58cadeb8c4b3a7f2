"""scvi-tools: variational autoencoders of the counts of genes in cells."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Normal

from tests.features.columns import GLOBAL_BATCH, Here
from tests.features.declared import by
from tests.features.network import Report, weights
from tests.zoo.foreign.declared import strategy_name, use
from tests.zoo.subjects import NUM_STEPS

NUM_GENES = 10
CALLS = "`setup_anndata`, `train`, `get_elbo`, `get_latent_representation`, `save`, `load`"


def _cells() -> Any:
    """Return as many cells as a step has samples."""
    import anndata

    counts = np.random.default_rng(3).poisson(3.0, (GLOBAL_BATCH, NUM_GENES))
    cells = anndata.AnnData(counts.astype(np.float32))
    cells.obs["lab"] = [f"lab {number % 2}" for number in range(GLOBAL_BATCH)]
    return cells


@contextmanager
def _no_noise() -> Iterator[None]:
    """Draw the means of normal distributions: each rank draws of its own stream."""

    def mean(self: Normal, sample_shape: Any = ()) -> Tensor:
        return self.loc.expand(self._extended_shape(sample_shape))

    with patch.object(Normal, "rsample", mean):
        yield


@use(
    "scvi-tools",
    "SCVI",
    CALLS,
    refused=by("tensor_parallel", "found nothing in TrainingPlan to split")
    | by("pipeline_parallel", "several lists of repeated blocks"),
)
def autoencoder(here: Here) -> Report:
    from scvi import settings
    from scvi.model import SCVI

    settings.seed = 5  # each rank would draw an order of the cells of its own
    cells = _cells()
    SCVI.setup_anndata(cells, batch_key="lab")
    norms = {"use_batch_norm": "none", "use_layer_norm": "both"}
    model = SCVI(cells, n_hidden=16, n_latent=4, dropout_rate=0.0, n_layers=2, **norms)
    with _no_noise():
        model.train(
            max_epochs=NUM_STEPS,
            accelerator="cpu",
            devices=here.column.num_ranks,
            strategy=strategy_name(here),
            batch_size=here.column.batch_size,
            train_size=1.0,
            plan_kwargs={"lr": 1e-2, "eps": 1e-3, "n_epochs_kl_warmup": None},
            enable_progress_bar=False,
        )
        elbo = float(model.get_elbo())
    latent = torch.tensor(model.get_latent_representation())
    model.save(str(here.folder / "saved"))
    loaded = SCVI.load(str(here.folder / "saved"), adata=cells)
    return {
        "weights": weights(model.module),
        "elbo": elbo,
        "latent": latent,
        "loaded": torch.tensor(loaded.get_latent_representation()),
    }
