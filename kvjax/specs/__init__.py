"""Policies, storages, selections and quantised weights from text and from a user's own Python files."""
