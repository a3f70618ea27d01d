"""The live view of a cell: ranks, logs, curves, timings; and the still picture it leaves."""
