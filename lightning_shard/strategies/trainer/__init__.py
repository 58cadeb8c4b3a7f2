"""The strategies' work for a Trainer: callbacks, loaders, logs, metrics and signals.

Nothing here knows a strategy class: a strategy calls what it needs with itself, its module or its
Trainer as arguments.
"""
