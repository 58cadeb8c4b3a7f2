"""What this machine has and lacks for training: `lightning-shard doctor` and `strategies`."""
