"""A run before it is one: what it takes, and which strategy, on which ranks, with which options.

strategy + module + batch ──> simulated ranks without elements ──> a dry run, a trace of a step

module + batch ──trace of one block──> anatomy ──> candidates ──> estimates ──> recommendation
                                                       │               └ machine profile
                                                       └ dry runs of the best, rank by rank
"""
