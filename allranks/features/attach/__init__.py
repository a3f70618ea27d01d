"""Ranks that stay when their notebook ends, and that several notebooks use."""
