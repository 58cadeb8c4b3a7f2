"""Step time and memory of every scheme beside what it replaces; `python -m tests.benchmarks`."""
