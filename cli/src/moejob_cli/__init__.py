"""Owns what a person types and reads in a terminal; never imports torch or the operator."""
