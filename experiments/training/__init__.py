"""Parts of `python -m experiments.train`: a tokenizer, a mixture of texts and tasks, optimizers."""
