"""The wait of OpenMP's threads for one another, in every process that computes on CPUs."""

from __future__ import annotations

from collections.abc import Mapping

# By its own default a thread looks some milliseconds for its next work before it sleeps. On two cores, beside one other
# busy process, a step of 0.5 s took 35 with it, and 0.8 with this; with nothing beside it, 0.7.
_SHORT_WAIT = {"GOMP_SPINCOUNT": "1000"}


def waiting_variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables for threads that soon give up their cores; none where the environment decides."""
    decides = environ.keys() & {"OMP_WAIT_POLICY", *_SHORT_WAIT}
    return {} if decides else _SHORT_WAIT
