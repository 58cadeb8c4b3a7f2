"""Says whether a module trains under a strategy as it does on one device, and if not, why."""
