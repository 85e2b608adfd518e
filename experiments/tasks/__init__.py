"""Tasks that tell caches apart: recall of generated facts, published questions, texts, and questions about contexts."""
