"""What benchmarks/operator.py is made of."""
