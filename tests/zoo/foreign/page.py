"""The table of the documentation, written from what is declared, which the tests try."""

from pathlib import Path

from tests.features.page import counts, tables
from tests.zoo.foreign.declared import STRATEGIES
from tests.zoo.foreign.rows import USES

PAGE = Path(__file__).parents[3] / "docs" / "packages.md"
HEAD = """# Other packages under each strategy

Packages that bring their own modules, loaders and Trainers, used as their guides do: trained, then
asked for predictions, saved and loaded by their own functions. "yes": all of it gives what one
device gives, the weights, what was logged, the predictions, and what was loaded again. "no": the
strategy refuses it with an error that says what to do; what the error says stands there too.
"broken": it goes wrong and no error says what to do; how stands there as well.

Each cell is a test: `pytest tests/zoo/foreign`. The ranks are two of one process, which share the
samples of one device's batch. Ranks draw random numbers of their own, so models have no dropout
here, and those of scvi-tools train without noise; batch norms are synchronised by
`sync_batchnorm=True`, except where there are none. pytorch-tabular and litgpt ask for older
releases than the other packages need, and are tried with the newer ones. This page is written by
`python -m tests.zoo.foreign --write docs/packages.md`.

Strategies are given as to any Trainer: through `pl_trainer_kwargs` to darts, among a model's own
arguments to neuralforecast, in `trainer_kwargs` by name (`"zero3"`) to pytorch-tabular, and to
`train` of scvi-tools. A package that makes a Trainer for each call may give all of them one
strategy object: each Trainer takes a new one of the same options.
"""


def page() -> str:
    """Return the Markdown page."""
    lines = [HEAD, counts(USES, STRATEGIES, "models"), *tables(USES, STRATEGIES, "model")]
    return "\n".join([*lines, *_whole(), *_calls()]) + "\n"


def _whole() -> list[str]:
    """Return the sentence that says which batches are not cut."""
    titles = "; ".join(f"{use.group}: {use.title}" for use in USES if use.whole)
    return [f"These are told `num_microbatches=1` under `pipeline_parallel`: {titles}.", ""]


def _calls() -> list[str]:
    """Return what was called of each package, a line for each."""
    calls = dict.fromkeys((use.group, use.calls) for use in USES)
    return ["## What was called", "", *(f"- {package}: {called}" for package, called in calls)]
