"""Connections that only those can use who know the job's token, and what is kept behind them.

    connect ──who are you?── Door         each proves to the other that it knows the token
       └──sealed messages──────┘          what is said afterwards nobody else can have said

Nothing here imports torch but the store's client: a job's server starts at once.
"""
