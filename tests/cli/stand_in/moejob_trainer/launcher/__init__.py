"""A launcher that speaks the contract and trains nothing."""
