"""Answers of a trained model: lists, explanations and vectors, for histories that a caller gives."""
