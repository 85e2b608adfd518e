"""Decisions before anything is traced: which groups of heads there are, how many slots, and which kernels."""
