"""Speed, memory and published tables: each command here prints a table and writes JSON; see README.md."""
