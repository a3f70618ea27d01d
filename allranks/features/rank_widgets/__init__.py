"""Widgets that cells make on ranks, whose views are in the notebook."""
