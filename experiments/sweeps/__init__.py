"""Sweeps: which worker runs what, the inputs of a result, and means over seeds."""
