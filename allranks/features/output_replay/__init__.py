"""Displays of long cells, kept for pages that are opened later."""
