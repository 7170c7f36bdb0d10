"""The driver that plans name, held against the pins of the images."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moejob_api.hardware import CUDA_OF_IMAGES, OLDEST_DRIVER

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
# NVIDIA's release notes of CUDA: the driver of each major version's first release, which its later ones run on.
DRIVERS = {12: 525, 13: 580}


@pytest.mark.parametrize("closure", ["trainer-gpu", "rollout-gpu"])
def test_the_driver_that_plans_name_runs_the_cuda_that_images_hold(closure: str) -> None:
    pins = (REQUIREMENTS / f"{closure}.txt").read_text()
    versions = re.findall(r"^nvidia-cuda-runtime==(\d+)\.", pins, re.MULTILINE)
    assert versions == [str(CUDA_OF_IMAGES)]
    assert DRIVERS[CUDA_OF_IMAGES] == OLDEST_DRIVER
