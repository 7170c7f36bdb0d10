"""The two that generate the same answers: our client with an engine of ours, and vLLM alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.rollout.alone import MARK
from engines import PYTHON, ROOT
from moejob_trainer.rollouts.fleet import FleetGenerator
from moejob_trainer.rollouts.interface import Floats, GenerationRequest, SamplingParams, Tokens

# Answers to each prompt.
MEMBERS = 8


async def our_rate(generator: FleetGenerator, number: int, prompts: Sequence[Tokens], answer_tokens: int) -> float:
    """Return the tokens a second of one round of answers to these prompts; `number` is the round's."""
    sampling = SamplingParams(1.0, 1.0, answer_tokens, ())
    requests = [
        GenerationRequest(1000 * number + group, member, prompt, 1000 * number + MEMBERS * group + member)
        for group, prompt in enumerate(prompts)
        for member in range(MEMBERS)
    ]
    begun = time.perf_counter()
    answers = await asyncio.gather(*(generator.generate(request, sampling) for request in requests))
    return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - begun)


def unknown(tokens: Tokens) -> Floats:
    """Return zeros for a trainer's log-probabilities where there is none: the probe's report is the engine's mean."""
    return np.zeros(len(tokens) - 1, np.float32)


class Alone:
    """A process with vLLM, through its own offline interface."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], settings: Mapping[str, Any], answer_tokens: int
    ) -> None:
        sampling = {"temperature": 1.0, "max_tokens": answer_tokens, "ignore_eos": True, "logprobs": 0}
        file = folder / "alone.json"
        file.write_text(json.dumps({"environment": environment, "settings": settings, "sampling": sampling}))
        self._log = folder / "alone.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(PYTHON), "-m", "benchmarks.rollout.alone", str(file)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def rate(self, prompts: Sequence[Tokens]) -> float:
        """Return the tokens a second of one round."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has pipes")
        members = [prompt.tolist() for prompt in prompts for _ in range(MEMBERS)]
        self._process.stdin.write(f"{json.dumps(members)}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                return float(line.removeprefix(MARK))
        raise RuntimeError(f"vLLM alone failed:\n{self._log.read_text()[-4000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # It ends with its input.
        self._process.communicate()
