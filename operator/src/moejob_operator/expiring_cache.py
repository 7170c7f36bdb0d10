"""A cache of one value for each job, until the job is gone. Knows no job, only its key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from moejob_operator.cluster import JobKey

Value = TypeVar("Value")

# More jobs than one operator runs. The bound also drops jobs whose deletion this process did not see.
_MOST = 4096


class ExpiringCache(Generic[Value]):
    """One value for each job. It counts for one identity only: a later job may have the same name."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._values: OrderedDict[JobKey, tuple[Hashable, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: JobKey, identity: Hashable) -> Value | None:
        """Return the kept value of a job, if it was of this identity."""
        known_identity, value = self._values.get(key, (None, None))
        return value if known_identity == identity else None

    def store(self, key: JobKey, identity: Hashable, value: Value) -> Value:
        """Keep a value in place of any other of the job. Returns it."""
        self._values[key] = (identity, value)
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return value

    def forget(self, key: JobKey) -> None:
        """Drop the value of a job that is gone."""
        self._values.pop(key, None)
