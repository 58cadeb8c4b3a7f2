"""Whole programs to begin from; docs/recipes.md has a section on each."""
