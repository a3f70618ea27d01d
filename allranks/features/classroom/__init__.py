"""A class: students who join show their teacher where they are, and nobody else."""
