"""Measurements of allranks beside its peers, on one machine and in one run.

``python -m benchmarks [NAME …]`` measures; ``python -m benchmarks report`` writes the figures
of docs/benchmarks.md and of the README from what was measured. Every figure comes from a file in
``results/``.
"""
