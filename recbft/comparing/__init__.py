"""Finished runs compared: which arm each belongs to, other systems' ranks, tests, pooling."""
