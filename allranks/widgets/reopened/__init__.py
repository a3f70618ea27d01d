"""Runs in the notebook's kernel: gives a page that is opened anew what it has missed."""
