"""The API server as this operator reads and writes it: client, watches, cache, lists; and the pods, asked over HTTP.

api_server.py implements moejob_operator.cluster for a real API server; the other modules are its parts. Must not know
kopf, nor how the operator decides about a job: observed/ turns the bodies read here into facts.
"""
