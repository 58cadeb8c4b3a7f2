"""Tests of the cluster environments."""
