"""Training: the loop, what it keeps of a run, and where it picks up again."""
