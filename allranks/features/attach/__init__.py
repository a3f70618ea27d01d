"""Ranks that stay when their notebook ends, for another one."""
