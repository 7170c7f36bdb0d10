"""The layout that a status shows: the planner's, of this job."""

from __future__ import annotations

import json

from fake_world import World
from moejob_api.job.job import Spec
from moejob_api.models.sources import UnseenModel, model_shape
from moejob_api.planner.plan import plan_job


def test_the_memory_of_a_gpu_is_what_the_planner_says() -> None:
    world = World()
    world.apply()
    world.settle()
    spec = Spec.model_validate_json(json.dumps(world.job["spec"]))
    seen = model_shape(spec.model.source, spec.model.revision, local_paths=False)
    assert not isinstance(seen, UnseenModel)
    need = plan_job(spec, seen).memory
    assert need is not None
    assert world.status.layout is not None
    assert world.status.layout.memory_per_gpu_bytes == need.bytes
