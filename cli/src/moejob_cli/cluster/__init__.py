"""Verbs on jobs of a cluster: what they print, by the client alone.

jobs.py connects, lists, follows and submits; each other module is a verb or the verbs on one kind of file.
"""
