"""Modules that are built on meta and get their values later."""
