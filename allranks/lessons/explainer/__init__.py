"""Runs in the notebook's kernel: shows an allreduce step by step, and leaves a still picture."""
