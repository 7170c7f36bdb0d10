"""Profiles: the fields that many jobs of a cluster share, named by spec.profile; how they are read and merged."""
