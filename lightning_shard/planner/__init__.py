"""Memory, traffic and idle time of a run that has not begun."""
