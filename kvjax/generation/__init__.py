"""The jitted loops: prompts, decoding, scores of texts and of choices, and text in and out."""
