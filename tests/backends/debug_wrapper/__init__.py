"""Tests of the mismatch check."""
