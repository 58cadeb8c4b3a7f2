"""A step that went wrong on real ranks, recorded there and taken again in one process.

    RecordSteps, a callback      each rank: a copy of its state, batches, random streams
         │ an error, a loss that is no number, or a step that was asked for
         v
    DIR/step-00000012/rank-00000.pt, rank-00001.pt ...
         │ lightning-shard replay
         v
    the same ranks as threads of one process: the same error, the same losses, bit for bit?

A recording sends nothing but one flag a batch, and each rank writes by itself, since a peer that is
lost answers nobody.
"""

from lightning_shard.replay.record_steps import RecordSteps
from lightning_shard.replay.replay import Replayed, replay

__all__ = ["RecordSteps", "Replayed", "replay"]
