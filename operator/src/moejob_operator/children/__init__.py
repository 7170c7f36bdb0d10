"""Manifests of everything a job consists of. Pure: the same attempt gives the same objects, byte for byte."""
