"""The optimizer's side of sharding: its state in shards, the full gradient's norm and clipping."""
