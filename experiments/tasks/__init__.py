"""Tasks that tell policies apart: generated, seeded, scored by exact match."""
