"""Ways for weights from ranks to engines."""
