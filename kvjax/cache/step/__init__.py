"""One step of one layer: select, append, attend, observe, evict, and the update of what is held."""
