"""What the calls cost: sums and the timeline."""
