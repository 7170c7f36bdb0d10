"""Benchmarks. Each of them appends lines to results/, from which its page is made."""
