"""A comparison as a reader meets it: one sentence, tables, plots and one self-contained page."""
