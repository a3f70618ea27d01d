"""Runs in every rank: start-up, device pinning, running one cell, telemetry out."""
