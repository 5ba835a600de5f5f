"""Sums over tokens on a GPU, bit for bit the same in every run: of parts, which are added up in one order."""
