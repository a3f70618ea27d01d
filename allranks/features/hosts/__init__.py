"""Ranks on several hosts: their agents in the notebook, and the relay on each host."""
