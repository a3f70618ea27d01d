"""The transport of one host: memory that its ranks share."""
