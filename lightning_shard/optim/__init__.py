"""The optimizer's side of sharding: its state in pieces, the norm and clipping of the whole."""
