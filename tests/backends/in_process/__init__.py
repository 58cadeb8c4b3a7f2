"""Tests of the in-process backend."""
