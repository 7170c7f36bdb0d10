"""Manifests of everything a job consists of. Pure: the same blueprint gives the same objects, byte for byte."""
