"""The validating webhook: its verdicts, its server, and the certificate that it serves with.

Owns the listener too, which bounds the connections of strangers; runtime/health.py serves probes and metrics over it.
Asks the API server through kube_api/. Must not know the queue, the election or the process that runs it.
"""
