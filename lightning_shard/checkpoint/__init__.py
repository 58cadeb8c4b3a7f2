"""Checkpoints in one canonical form: the module's own parameter names and shapes."""
