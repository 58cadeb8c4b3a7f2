"""Ordinary Lightning programs: a strategy is chosen on the command line, never in the code."""
