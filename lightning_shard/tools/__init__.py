"""What looks at trainings from outside: the machine, and proofs of modules."""
