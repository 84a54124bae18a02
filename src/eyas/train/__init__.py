"""Training: from a store of hidden states to an EAGLE-3 draft model."""
