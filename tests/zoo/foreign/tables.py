"""pytorch-tabular: networks over the columns of a table; it is built on `pytorch_lightning`."""

from contextlib import chdir
from typing import Any

import numpy as np
import torch

from tests.features.columns import GLOBAL_BATCH, Here
from tests.features.declared import by
from tests.features.network import Report, weights
from tests.zoo.foreign.declared import strategy_name, use
from tests.zoo.packages import add_folder
from tests.zoo.subjects import NUM_STEPS

CALLS = "`TabularModel.fit`, `evaluate`, `predict`, `save_model`, `load_model`"


def _table() -> Any:
    """Return as many rows as a step has samples."""
    import pandas as pd

    rows = np.arange(GLOBAL_BATCH, dtype=np.float32)
    return pd.DataFrame(
        {
            "height": np.sin(rows),
            "width": rows % 3,
            "kind": [str(row % 2) for row in range(GLOBAL_BATCH)],
            "target": rows % 5,
        }
    )


def _tabular(here: Here, name: str, **sizes: Any) -> Report:
    add_folder()
    from pytorch_tabular import TabularModel, models
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig

    quiet = {
        "strategy": strategy_name(here),  # its configs hold no objects
        "enable_model_summary": False,
        "default_root_dir": str(here.folder),
        "num_sanity_val_steps": 0,
    }
    model = TabularModel(
        data_config=DataConfig(
            target=["target"],
            continuous_cols=["height", "width"],
            categorical_cols=["kind"],
            normalize_continuous_features=False,
        ),
        model_config=getattr(models, f"{name}Config")(
            task="regression", batch_norm_continuous_input=False, learning_rate=1e-2, **sizes
        ),
        optimizer_config=OptimizerConfig(optimizer="SGD"),
        trainer_config=TrainerConfig(
            batch_size=here.column.batch_size,
            max_epochs=NUM_STEPS,
            accelerator="cpu",
            devices=here.column.num_ranks,
            early_stopping=None,
            checkpoints="valid_loss",
            checkpoints_path=str(here.folder / "checkpoints"),
            load_best=True,
            progress_bar="none",
            trainer_kwargs=quiet,
        ),
        verbose=False,
    )
    table = _table()
    model.fit(train=table, validation=table, seed=7)
    evaluated = model.evaluate(table, verbose=False)
    predicted = model.predict(table)
    model.save_model(str(here.folder / "saved"))
    loaded = TabularModel.load_model(str(here.folder / "saved"))
    return {
        "weights": weights(model.model),
        "evaluated": evaluated,
        "predicted": torch.tensor(predicted["target_prediction"].to_numpy()),
        "loaded": torch.tensor(loaded.predict(table)["target_prediction"].to_numpy()),
    }


@use(
    "pytorch-tabular",
    "CategoryEmbeddingModel",
    CALLS,
    refused=by("tensor_parallel", "found nothing in CategoryEmbeddingModel to split"),
)
def embeddings(here: Here) -> Report:
    with chdir(here.folder):  # into which the package writes
        return _tabular(here, "CategoryEmbeddingModel", layers="16-16", dropout=0.0)


@use(
    "pytorch-tabular",
    "FTTransformer",
    CALLS,
    refused=by("pipeline_parallel", "instead of writing into one"),
)
def transformer(here: Here) -> Report:
    dropouts = dict.fromkeys(("attn_dropout", "ff_dropout", "add_norm_dropout"), 0.0)
    sizes = {"input_embed_dim": 16, "num_heads": 2, "num_attn_blocks": 4}
    with chdir(here.folder):
        return _tabular(here, "FTTransformer", **sizes, **dropouts)
