"""The validating webhook: its verdicts, its server, and the certificate that it serves with."""
