"""The experts that each token was routed to, recorded on the CPU as vLLM records them on GPUs.

vLLM 0.32 writes down the choices of experts in its second model runner alone, which needs Triton. The first runner
works on the CPU, and gets the same recorder here. That covers cached prompts and preempted requests in the same way:
the recorder keeps choices under the hashes of the cache's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    """The requests of one step, their first computed tokens and the rows of each: what the recorder reads of a step."""

    req_ids: list[str]
    num_computed_tokens_np: list[int]
    query_start_loc_np: list[int]


def record_on_cpu() -> None:
    """Let engines on the CPU return routed experts, where they are asked to."""
    _allow_first_runner()
    _make_recorder()
    _record_steps()


def _allow_first_runner() -> None:
    # The rest of what it would refuse is settled by the arguments of our engines: prefix caching, no speculation, no
    # pipeline; a job without experts is refused before it starts.
    VllmConfig._verify_aux_output_compatibility = lambda _: None  # noqa: SLF001  # it has no public name


def _make_recorder() -> None:
    original = CPUModelRunner.initialize_kv_cache

    @wraps(original)
    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, kv_cache_config, *args, **kwargs)
        if self.vllm_config.aux_output_config.enabled:
            self.recorder = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    CPUModelRunner.initialize_kv_cache = initialize_kv_cache


def _record_steps() -> None:
    execute, sample = CPUModelRunner.execute_model, CPUModelRunner.sample_tokens

    @wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if (recorder := getattr(self, "recorder", None)) is not None:
            recorder.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(self, scheduler_output, *args, **kwargs)

    @wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = getattr(self, "recorder", None)
        if recorder is None or self.execute_model_state is None:
            return sample(self, *args, **kwargs)
        # Before sampling: it moves the places of requests in the batch.
        pending = recorder.prepare_output(_read_step(self))
        output = sample(self, *args, **kwargs)
        if pending is not None:
            counts = [len(tokens) for tokens in output.sampled_token_ids]
            # Without speculation the model accepts every sampled token.
            pending.enqueue_cpu_copy(counts, [0] * len(counts))
            output.aux_output_connector_output = pending.process_output()
        return output

    CPUModelRunner.execute_model, CPUModelRunner.sample_tokens = execute_model, sample_tokens


def _read_step(runner: Any) -> _RecordedStep:
    batch = runner.input_batch
    count = batch.num_reqs
    return _RecordedStep(
        list(batch.req_ids[:count]),
        batch.num_computed_tokens_cpu[:count].tolist(),
        runner.query_start_loc.np[: count + 1].tolist(),
    )
