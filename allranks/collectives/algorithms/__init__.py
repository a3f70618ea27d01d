"""Allreduce algorithms written to be read, on every rank; one file each, over any link."""
