"""Forecast time series with neuralforecast, by its own functions, on several ranks.

    python -m examples.recipes.forecast
    python -m examples.recipes.forecast --strategy zero2 --accelerator gpu --devices 8

Series with a trend, a season and noise are made from a seed. Their last year is forecast and
compared with the year before it, which is what somebody without a model would say.
"""

import argparse
import logging
import warnings
from pathlib import Path

try:
    import numpy as np
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS
except ModuleNotFoundError as error:
    raise SystemExit(f"This recipe needs {error.name}: pip install neuralforecast") from None

import lightning_shard  # noqa: F401  the import registers the names of the strategies

YEAR, NUM_YEARS, NUM_SERIES = 12, 10, 16


def make_table() -> pd.DataFrame:
    """Return a row for each month of each series, in neuralforecast's long form."""
    random = np.random.default_rng(0)
    months = np.arange(YEAR * NUM_YEARS)
    tables = []
    for number in range(NUM_SERIES):
        phase, slope, height = random.uniform((0, 0.02, 1), (6.28, 0.08, 3))
        season = height * np.sin(2 * np.pi * months / YEAR + phase)
        values = 10 + slope * months + season + random.normal(0, 0.3, len(months))
        dates = pd.date_range("2015-01-01", periods=len(months), freq="MS")
        tables.append(pd.DataFrame({"unique_id": f"series {number}", "ds": dates, "y": values}))
    return pd.concat(tables, ignore_index=True)


def main() -> None:
    """Fit all but the last year, forecast it, save and load the model, and compare."""
    parser = argparse.ArgumentParser(description="Forecast time series with neuralforecast.")
    parser.add_argument("--strategy", default="zero2_in_process")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("build/recipes/forecast"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    table = make_table()
    is_last = table.groupby("unique_id").cumcount() >= YEAR * (NUM_YEARS - 1)
    past, future = table[~is_last], table[is_last]
    model = NHITS(
        h=YEAR,
        input_size=2 * YEAR,
        max_steps=options.steps,
        batch_size=NUM_SERIES // options.devices,
        windows_batch_size=64,
        mlp_units=3 * [[64, 64]],
        scaler_type="standard",
        random_seed=0,
        # The rest is passed on to the Trainer.
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    forecasts = NeuralForecast(models=[model], freq="MS")
    forecasts.fit(past)
    predicted = forecasts.predict()
    forecasts.save(str(options.folder), overwrite=True)
    compared = predicted.merge(future, on=["unique_id", "ds"])
    error = (compared["NHITS"] - compared["y"]).abs().mean()
    last_year = past.groupby("unique_id").tail(YEAR)["y"].to_numpy()
    naive = np.abs(last_year - future["y"].to_numpy()).mean()
    print(f"mean error of a month {error:.2f}, of the year before {naive:.2f}, of noise 0.24")


if __name__ == "__main__":
    main()
