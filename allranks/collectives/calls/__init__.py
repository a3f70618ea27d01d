"""What a call is, what it brings, how it waits, what is known of the others."""
