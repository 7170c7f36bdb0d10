"""Findings in refusals of the API server: which of its admission steps has refused a pod, in its own words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from moejob_api.diagnosis.blockers import Blocker
from moejob_api.diagnosis.findings import Finding

# The first whose words a refusal holds decides; its first group is the object that the advice names.
_RULES = (
    (re.compile(r"exceeded quota: ([^,\s]+)"), Blocker.QUOTA_EXCEEDED),
    (re.compile(r"failed calling webhook \"([^\"]+)\""), Blocker.ADMISSION_WEBHOOK_DOWN),
    (re.compile(r"violates PodSecurity \"([^\"]+)\""), Blocker.POD_SECURITY),
    (re.compile(r"serviceaccount \"([^\"]+)\" not found"), Blocker.SERVICE_ACCOUNT_MISSING),
    (re.compile(r"no PriorityClass with name (\S+) was found"), Blocker.PRIORITY_CLASS_MISSING),
    (re.compile(r"RuntimeClass \"([^\"]+)\" not found"), Blocker.RUNTIME_CLASS_MISSING),
    (re.compile(r"()because it is being terminated"), Blocker.NAMESPACE_ENDING),
    (re.compile(r"()(?:maximum|minimum) \S+ (?:usage )?per (?:Container|Pod)"), Blocker.LIMIT_RANGE),
    (re.compile(r"admission webhook \"([^\"]+)\" denied"), Blocker.ADMISSION_DENIED),
    (re.compile(r"ValidatingAdmissionPolicy '([^']+)'"), Blocker.ADMISSION_DENIED),
    (re.compile(r"()is in the way"), Blocker.NAME_TAKEN),
    (re.compile(r"()exceeded quota"), Blocker.QUOTA_EXCEEDED),
)
# `used:` changes with every other pod of the namespace.
_USED = re.compile(r", used: .*?(?=, limited: )")


def refusal_findings(message: str, since: datetime | None) -> Iterator[Finding]:
    """Yield the finding of a refusal."""
    text = _USED.sub("", message)
    for pattern, blocker in _RULES:
        if match := pattern.search(message):
            yield Finding(blocker, text, since, match[1])
            return
    yield Finding(Blocker.CREATION_REFUSED, text, since)
