"""The API server as this operator reads and writes it: client, watches, cache, lists; and the pods, asked over HTTP."""
