"""Trainings whose bits do not depend on the number of ranks: sums in one order."""
