"""Runs MoETrainingJobs on Kubernetes. Importing it registers the handlers, as `kopf run -m moejob_operator` expects.

Modules beside the rooms are the way of one reconcile (handlers, reconcile, decide), what several rooms share (actions,
cluster, validation, expiring_cache, logs), and the program of `helm test` (installed).
"""

from moejob_operator import handlers as handlers
