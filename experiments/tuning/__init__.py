"""Parts of the commands that train under a cache: settings, windows of texts, runs, steps, evaluation, reports."""
