"""Tests of the examples and of the configs."""
