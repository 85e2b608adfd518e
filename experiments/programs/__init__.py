"""The programs of experiments: each is imported once the command line was read, for it imports jax."""
