"""What `python -m experiments.train` is made of: a tokenizer, a mixture of texts and tasks, optimizers."""
