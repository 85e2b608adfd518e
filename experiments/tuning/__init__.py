"""Parts of `python -m experiments.tune`: settings, trained parameters, windows of texts, evaluation, report."""
