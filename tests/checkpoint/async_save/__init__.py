"""Tests of saves that go on while the run trains."""
