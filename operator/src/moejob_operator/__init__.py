"""Runs MoETrainingJobs on Kubernetes. Importing it registers the handlers, as `kopf run -m moejob_operator` expects."""

from moejob_operator import handlers as handlers
