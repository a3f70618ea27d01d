"""Gives torch's process groups to allranks, and ends waits in torch's own groups and in JAX."""
