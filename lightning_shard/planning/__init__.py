"""Which strategy, on which ranks, with which options: searched before anything runs.

module + batch ──trace of one block──> anatomy ──> candidates ──> estimates ──> recommendation
                                                      │               └ machine profile
                                                      └ dry runs of the best, rank by rank
"""
