"""What the calls cost: sums and the timeline. Runs in every rank."""
