"""Speculation: tokens that a short reading of the cache drafts, and that the full cache verifies."""
