"""How the parts of entries are measured, on top of what `experiments` and `kvjax.analysis` have."""
