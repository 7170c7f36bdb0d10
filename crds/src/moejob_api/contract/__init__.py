"""The contract of processes that may not import one another: operator, pods, engines and `moejob run`.

Owns what two processes have to know alike: names, ports, paths, exit codes, the JSON of messages, the handshake and the
rendezvous of groups. Knows the job and how its text is read. Must not know models, layouts or rules.
"""
