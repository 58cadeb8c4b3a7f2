"""Modules that are built on torch's "meta" device and get their values later, shard by shard.

    with trainer.init_module(empty_init=True):    recorder.py      what is drawn and computed is
        model = Net()                             tape.py          noted, with random states
    model on meta that nobody saw being built     start.py         `reset_parameters` is noted
    engine, one unit after the other                               notes become values, and shards

The values are those of a module that is built on the CPU. No rank ever holds more than its shards
and one unit.
"""
