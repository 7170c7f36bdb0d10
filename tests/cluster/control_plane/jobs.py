"""Jobs as the API server is given them: plain JSON, which no model of ours has read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from builders import GRPO, SFT, merge_sections

Body = dict[str, Any]


def body(name: str = "job", **sections: Any) -> Body:
    """A job that breaks no rule, with the given sections (camelCase) laid over it; None removes."""
    base = GRPO if sections.get("method") == "GRPO" else SFT
    return with_spec(merge_sections(base, sections), name)


def with_spec(spec: Mapping[str, Any], name: str = "job") -> Body:
    """A job around a spec."""
    return {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": name},
        "spec": dict(spec),
    }


def text(job: Body) -> str:
    """A job for kubectl to read."""
    return json.dumps(job)


def path(namespace: str, name: str = "", *, part: str = "", is_tried_only: bool = False) -> str:
    """Return where jobs are; `part` is a subresource, and what is only tried is checked like all else but not kept."""
    at = "/".join(["/apis/moejob.dev/v1alpha1/namespaces", namespace, "moetrainingjobs", *filter(None, (name, part))])
    return f"{at}?fieldValidation=Strict{'&dryRun=All' if is_tried_only else ''}"
