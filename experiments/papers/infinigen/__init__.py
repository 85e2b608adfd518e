"""Entries of InfiniGen (arXiv:2406.19707)."""
