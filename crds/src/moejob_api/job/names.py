"""Names under which the API server knows a job. Programs that only ask for jobs need no model of them."""

from typing import Literal

GROUP = "moejob.dev"
# The version that etcd stores, and that the operator speaks: also the definition of the first release serves it.
VERSION = "v1alpha1"
# docs/decisions/versions.md says why both have the same fields.
BETA_VERSION = "v1beta1"
API_VERSIONS = (f"{GROUP}/{BETA_VERSION}", f"{GROUP}/{VERSION}")
KIND: Literal["MoETrainingJob"] = "MoETrainingJob"
PLURAL = "moetrainingjobs"

# Pods are called {job}-{role}-{attempt}-{index} and their host names must fit a DNS label of 63 characters.
MAX_NAME = 40
