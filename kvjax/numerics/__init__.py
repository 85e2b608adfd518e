"""Numerics of policies and decoders: statistics of slots, selection of the largest, rotary embedding, checks."""
