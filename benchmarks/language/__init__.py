"""Sequences of words: the published experiments on text, at a size that a few cores can run."""
