"""One data-parallel engine with four stages: what is replicated and what each rank holds 1/N of."""
