"""A class: students who join show their teacher, and no other person, where they are."""
