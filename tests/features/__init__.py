"""Lightning's documented features under every strategy, declared once and tried out.

    columns.py      the strategies, each on ranks of this process
    network.py      a small module with data, and what a fit of it leaves
    declared.py     what a feature is, and how a strategy's answer is compared
    flags.py        the Trainer's flags
    callbacks.py    Lightning's callbacks
    files.py        checkpoints, resuming, loggers, profilers
    optimizing.py   ways of optimizing
    hooks.py        hooks of a module
    logged.py       self.log and metrics
    data.py         loaders, samplers, streams
    entries.py      the Trainer's entry points
    page.py         the table of the documentation

A cell of the table says that a feature does under a strategy what it does on one device, or that
the strategy refuses it by name. `test_features.py` tries every cell.
"""
