"""Transports of weights from ranks to engines."""
