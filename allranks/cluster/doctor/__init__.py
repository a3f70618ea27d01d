"""What ranks need of this machine, looked at. Runs in the notebook's kernel and in a shell.

Packages are asked for by their metadata: none is imported.
"""
