"""Thin programs over the library: run, sweep, bench."""
