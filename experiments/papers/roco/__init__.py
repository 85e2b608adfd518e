"""Entries of RoCo (arXiv:2402.06262)."""
