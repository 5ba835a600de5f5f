"""Experiments of docs/study.md that are not plain comparisons of arms."""
