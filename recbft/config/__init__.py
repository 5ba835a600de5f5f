"""Configurations: frozen dataclasses, YAML text, and RecBole's words for the same."""
