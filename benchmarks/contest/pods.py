"""The pod that our operator makes, as a user writes it into the template of another's job.

Who compares operators compares pods that can do the same: a job that names its volumes, limits and rights is no other
work for the API server because another operator created its pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from golden_manifests import create_manifests

Body = dict[str, Any]

# What each operator adds by itself: who a pod is, where the others are, when it starts again.
_BY_ITS_OPERATOR = ("hostname", "subdomain", "restartPolicy")


def pod_template(job: Mapping[str, Any], container: str) -> Body:
    """That of the first pod of a job of ours, with its container under the name that the other wants."""
    held = {**job, "metadata": {**job["metadata"], "namespace": "peer", "uid": "0", "generation": 1}}
    pod = next(manifest for manifest in create_manifests(held, frozenset()) if manifest["kind"] == "Pod")
    spec = {name: value for name, value in pod["spec"].items() if name not in _BY_ITS_OPERATOR}
    [trainer] = spec["containers"]
    alone = {name: value for name, value in trainer.items() if name != "env"}
    return {
        "metadata": {"annotations": pod["metadata"].get("annotations", {})},
        "spec": spec | {"containers": [alone | {"name": container, "command": ["python3", "train.py"]}]},
    }
