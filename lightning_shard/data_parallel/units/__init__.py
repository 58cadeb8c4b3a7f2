"""Units: which modules are gathered and freed together, and when."""
