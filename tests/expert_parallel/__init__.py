"""Tests of expert parallel."""
