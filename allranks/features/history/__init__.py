"""The cells of a notebook that have ended: drawn again, compared, exported."""
