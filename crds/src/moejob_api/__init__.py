"""The meaning of a MoETrainingJob; knows nothing of Kubernetes clients, torch or the terminal.

Modules beside the packages belong to none of them. Several packages read arithmetic, hardware, problems and quantities,
which know the job at most. derived.py stands between layout/ and rules/. learning_signals.py, owned_folders.py and
router_health.py are for distributions that may not import one another: trainer, engines, operator and command line.
"""
