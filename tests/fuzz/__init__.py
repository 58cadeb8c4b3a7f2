"""Random programs: plausible LightningModules that train under every scheme as on one device.

    features.py    what a program may be made of, and what goes with what
    models.py, batches.py, steps.py, optimizing.py, hooks.py, trainers.py     the features
    program.py     features and a seed -> the source of a script that stands alone
    schemes.py     the strategies, as source, and what their pages do not promise
    run.py         one program under one scheme -> a verdict
    workers.py     processes that do so, and the watchdog that ends those that hang
    shrink.py      the fewest features that still go wrong
    campaign.py    many programs, and what is said of them in the end

`python -m tests.fuzz --count 100` draws a hundred programs; `make fuzz COUNT=100` does, too.
"""
