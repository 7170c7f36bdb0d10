"""The API server as this operator reads and writes it: client, watches, cache, lists; and the pods, asked over HTTP.

api_server.py is the real one of the two implementations of moejob_operator.cluster; the other modules are its parts.
Must not know kopf, nor how a job is decided about: what is read here becomes facts in observed/.
"""
