"""Answers of the notebook's kernel to its front end while a cell runs."""
