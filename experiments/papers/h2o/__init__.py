"""Entries of H2O (arXiv:2306.14048)."""
