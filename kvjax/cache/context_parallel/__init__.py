"""A step of layers whose slots are divided over devices."""
