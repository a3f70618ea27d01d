"""Lessons: allreduce in readable code, a cost model of it, and an explainer.

No other package imports this one, so it can be deleted.
"""
