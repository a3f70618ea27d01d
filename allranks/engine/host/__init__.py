"""One process on each host starts the ranks, watches them, and takes everything down."""
