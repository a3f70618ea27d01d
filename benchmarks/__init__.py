"""Measurements of allranks and of similar tools, on one machine and in one run.

``python -m benchmarks [NAME …]`` measures. ``python -m benchmarks report`` writes the results into
docs/benchmarks.md and the README. Every figure comes from a file in ``results/``.
"""
