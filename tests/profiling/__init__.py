"""Tests of the profiling callbacks."""
