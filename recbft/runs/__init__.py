"""What lies on disk of a run: its folder, checkpoint, lock, and where it was made."""
