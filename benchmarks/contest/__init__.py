"""The parts of benchmarks/operator.py."""
