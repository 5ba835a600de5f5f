"""Read the named columns of a file: formats, delimited text, dates, missing values."""
