"""How the slots of a storage are arranged: in blocks, in segments, in tiers, or in pairs of layers."""
