"""Who takes part in an elastic run: generations, the table of members, who keeps it."""
