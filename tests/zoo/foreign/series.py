"""darts and neuralforecast: forecasts of time series; both are built on `pytorch_lightning`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tests.features.columns import GLOBAL_BATCH, Here
from tests.features.declared import by
from tests.features.network import Report, weights
from tests.zoo.foreign.declared import use
from tests.zoo.subjects import NUM_STEPS

LENGTH, INPUT, OUTPUT = 17, 6, 3


def _quiet(here: Here) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "devices": here.column.num_ranks,
        "strategy": here.column.strategy(),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "default_root_dir": str(here.folder),
    }


def _darts_series() -> Any:
    from darts import TimeSeries

    # Samples are windows: an epoch has as many as a step.
    steps = np.arange(INPUT + OUTPUT + GLOBAL_BATCH - 1, dtype=np.float32)
    return TimeSeries.from_values(np.stack([np.sin(steps), steps % 3], axis=1))


def _darts(here: Here, name: str, num_predicted: int = OUTPUT, **sizes: Any) -> Report:
    from darts import models

    chosen = getattr(models, name)
    model = chosen(
        input_chunk_length=INPUT,
        output_chunk_length=OUTPUT,
        batch_size=here.column.batch_size,
        n_epochs=NUM_STEPS,
        random_state=7,
        optimizer_cls=torch.optim.SGD,
        optimizer_kwargs={"lr": 1e-2},
        pl_trainer_kwargs=_quiet(here),
        work_dir=str(here.folder),
        model_name=name,
        save_checkpoints=True,
        **sizes,
    )
    series = _darts_series()
    model.fit(series, val_series=series)
    trained = weights(model.model)
    horizons = [series[:one] for one in (INPUT + 1, INPUT + 4)]
    predicted = [one.values() for one in model.predict(num_predicted, series=horizons)]
    model.save(str(here.folder / "model.pt"))
    loaded = chosen.load(str(here.folder / "model.pt"), trusted=True)  # it has the strategy, too
    resumed = chosen.load_from_checkpoint(name, str(here.folder), best=False, trusted=True)
    return {
        "weights": trained,
        "predicted": torch.tensor(np.stack(predicted)),
        "backtest": float(model.backtest(series, start=INPUT, retrain=False)),
        "loaded": torch.tensor(loaded.predict(num_predicted).values()),
        "checkpoint": weights(resumed.model),
    }


DARTS_CALLS = (
    "`fit`, `predict`, `backtest`; `save`, `load`; `save_checkpoints`, `load_from_checkpoint`"
)


@use(
    "darts",
    "NBEATSModel",
    DARTS_CALLS,
    refused=by("tensor_parallel", "found nothing in _NBEATSModule to split")
    | by("pipeline_parallel", "computed from 'a block of an earlier stage'"),
)
def nbeats(here: Here) -> Report:
    return _darts(here, "NBEATSModel", num_stacks=2, num_blocks=2, num_layers=2, layer_widths=8)


@use(
    "darts",
    "TransformerModel",
    DARTS_CALLS,
    refused=by("pipeline_parallel", "several lists of repeated blocks"),
)
def transformer(here: Here) -> Report:
    return _darts(
        here,
        "TransformerModel",
        d_model=16,
        nhead=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=16,
        dropout=0.0,
    )


@use("darts", "TiDEModel", DARTS_CALLS)
def tide(here: Here) -> Report:
    return _darts(here, "TiDEModel", hidden_size=16, num_encoder_layers=2, dropout=0.0)


@use(
    "darts",
    "TiDEModel, a horizon of several outputs",
    DARTS_CALLS,
    refused=by("pipeline_parallel", "calls the block 'encoders.0' after the blocks of this stage"),
)
def long_horizon(here: Here) -> Report:
    sizes = {"hidden_size": 16, "num_encoder_layers": 2, "dropout": 0.0}
    return _darts(here, "TiDEModel", num_predicted=2 * OUTPUT, **sizes)


def _table() -> Any:
    """Return as many series as a step has samples."""
    import pandas as pd

    rows = [
        {"unique_id": f"series {number}", "ds": step, "y": float((step * (number + 2)) % 7)}
        for number in range(GLOBAL_BATCH)
        for step in range(LENGTH)
    ]
    return pd.DataFrame(rows)


def _neuralforecast(
    here: Here, name: str, flags: Mapping[str, Any] | None = None, **sizes: Any
) -> Report:
    import neuralforecast

    model = getattr(neuralforecast.models, name)(
        h=OUTPUT,
        input_size=INPUT,
        max_steps=NUM_STEPS,
        batch_size=here.column.batch_size,
        windows_batch_size=None,
        inference_windows_batch_size=-1,
        learning_rate=1e-2,
        optimizer=torch.optim.SGD,
        scaler_type="standard",
        random_seed=7,
        training_data_availability_threshold=1.0,
        **sizes,
        **_quiet(here),
        **(flags or {}),
    )
    forecasts = neuralforecast.NeuralForecast(models=[model], freq=1)
    table = _table()
    forecasts.fit(table, val_size=OUTPUT)
    predicted = forecasts.predict()
    forecasts.save(str(here.folder / "saved"), overwrite=True)
    loaded = neuralforecast.NeuralForecast.load(str(here.folder / "saved"))
    loaded.models[0].trainer_kwargs |= _quiet(here)  # a file names no strategy
    again = loaded.predict()
    return {
        "weights": weights(forecasts.models[0]),
        "validated": [value for _, value in forecasts.models[0].valid_trajectories],
        "predicted": torch.tensor(predicted[name].to_numpy()),
        "series": predicted["unique_id"].tolist(),
        "loaded": torch.tensor(again[name].to_numpy()),
    }


NEURALFORECAST_CALLS = "`NeuralForecast.fit`, `predict`, `save`, `load`"


@use(
    "neuralforecast",
    "NHITS",
    NEURALFORECAST_CALLS,
    refused=by("tensor_parallel", "found nothing in NHITS to split")
    | by("pipeline_parallel", "asks for the elements of a value"),
)
def nhits(here: Here) -> Report:
    return _neuralforecast(here, "NHITS", mlp_units=3 * [[8, 8]], n_freq_downsample=[2, 1, 1])


@use(
    "neuralforecast",
    "PatchTST",
    NEURALFORECAST_CALLS,
    whole=("pipeline_parallel",),  # batch norms
)
def patchtst(here: Here) -> Report:
    return _neuralforecast(
        here,
        "PatchTST",
        {"sync_batchnorm": True},
        encoder_layers=4,
        n_heads=2,
        hidden_size=16,
        linear_hidden_size=16,
        dropout=0.0,
        fc_dropout=0.0,
        head_dropout=0.0,
        attn_dropout=0.0,
        patch_len=3,
        stride=3,
    )


@use(
    "neuralforecast",
    "iTransformer, of all series at once",
    NEURALFORECAST_CALLS,
    refused=by("tensor_parallel", "found nothing in iTransformer to split"),
    whole=("pipeline_parallel",),  # a batch's series are one sample
)
def itransformer(here: Here) -> Report:
    return _neuralforecast(
        here,
        "iTransformer",
        n_series=GLOBAL_BATCH,
        hidden_size=16,
        n_heads=2,
        e_layers=4,
        d_ff=16,
        dropout=0.0,
    )
