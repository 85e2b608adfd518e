"""A run: its texts, its model, what it measures, and the machine that it runs on."""
