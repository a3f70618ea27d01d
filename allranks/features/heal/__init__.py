"""Variables that outlive the death of their rank."""
