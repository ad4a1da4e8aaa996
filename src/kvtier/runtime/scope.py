"""Scopes (being written)."""
dropped: list[str] = []
