"""Elastic training: membership, and how the state is restored when ranks come and go."""
