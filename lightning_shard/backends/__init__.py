"""Process groups, the `Collectives` facade over them, and how much they have sent."""
