"""The machine: files, processes, memory, and the version of what runs."""
