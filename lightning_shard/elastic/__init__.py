"""Elastic training: who takes part, and what becomes of the state when ranks come and go."""
