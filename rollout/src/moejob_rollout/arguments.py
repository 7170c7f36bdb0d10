"""vLLM's arguments and environment variables, as they follow from a job. Pure.

Weights are dummies at the start: an engine answers only with the trainer's weights, of a version that both know.
Log-probabilities are those of the distribution that was sampled from, temperature and top-p applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moejob_api.contract.engines import SERVER_IDLE_SECONDS, weight_transport
from moejob_api.contract.threads import waiting_variables
from moejob_api.job.grpo import RolloutPlacement
from moejob_api.job.resources import Accelerator
from moejob_api.planner.memory.constants import CPU_ENGINE_CACHE_BYTES
from moejob_rollout.engine import EngineEnvironment
from moejob_rollout.listener import HEAD_BYTES

MIDDLEWARE = "moejob_rollout.authentication.KeyAuthentication"
WORKER_EXTENSION = "moejob_rollout.transfer.worker_extension.WorkerExtension"
# Each token of an answer is one replay of a recorded graph; without it the host launches a thousand kernels.
# Recording takes seconds; compiling, which this leaves out, takes minutes at each start.
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# The only worker of an engine lives in the process that schedules, as on a GPU: another would import vLLM again, for
# ten seconds of a core. vLLM would turn "uni" into "mp" on a CPU to bind threads; this module binds them by variables.
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def server_arguments(engine: EngineEnvironment, model: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the command line of vLLM's server for a model folder with this config.json."""
    spec, rollout = engine.spec, engine.grpo.rollout
    common = [
        f"--model={model}",
        "--load-format=dummy",
        # Prompts and answers are token ids: the tokenizer is the trainer's, and so are stop tokens.
        "--tokens-only",
        "--generation-config=vllm",
        f"--dtype={spec.model.dtype.value}",
        f"--max-model-len={max_sequence_tokens(engine, config)}",
        f"--tensor-parallel-size={rollout.tensor}",
        f"--seed={spec.training.seed}",
        "--logprobs-mode=processed_logprobs",
        "--enable-prefix-caching",
        # The probe of a publication comes before unfinished answers, all of which the engine reads again.
        "--scheduling-policy=priority",
        f"--weight-transfer-config={json.dumps({'backend': f'moejob_{weight_transport(spec).value.lower()}'})}",
        f"--worker-extension-cls={WORKER_EXTENSION}",
        f"--middleware={MIDDLEWARE}",
        f"--host={engine.listens_on}",
        f"--port={engine.port}",
        f"--h11-max-incomplete-event-size={HEAD_BYTES}",
        # A line for each of a thousand answers a step would hide everything else, and so would a line for each client
        # that sends no HTTP.
        "--disable-uvicorn-access-log",
        "--uvicorn-log-level=error",
        "--disable-fastapi-docs",
    ]
    replay = ["--enable-return-routed-experts"] if engine.grpo.routing_replay else []
    remote = ["--trust-remote-code"] if spec.model.trust_remote_code else []
    return [*common, *replay, *remote, *_accelerator_arguments(engine, config)]


def max_sequence_tokens(engine: EngineEnvironment, config: Mapping[str, Any]) -> int:
    """Return the tokens of the longest prompt and answer, as far as the model has positions for them."""
    needed_tokens = engine.spec.data.max_length + engine.grpo.max_new_tokens
    return min(needed_tokens, int(config.get("max_position_embeddings", needed_tokens)))


def vllm_variables(engine: EngineEnvironment, cores: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that vLLM reads when it is imported, beside those of this environment."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "moejob"}
    # Only this mode has pausing, sleeping and weight transfer; all of their paths need the key of the job.
    control = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_IDLE_SECONDS)}
    if engine.spec.resources.accelerator is Accelerator.CPU:
        threads = {**thread_variables(cores, engine.grpo.rollout.tensor), **waiting_variables(environ)}
        # torch.compile would need a compiler of C++ at run time.
        return quiet | control | {"TORCHDYNAMO_DISABLE": "1"} | threads
    # FlashInfer's sampler is compiled at the first start.
    gpu = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return quiet | control | gpu


def thread_variables(cores: Sequence[int], tensor: int) -> dict[str, str]:
    """Return the variables that bind each worker to cores of its own, on which no other makes it wait."""
    if tensor == 1:
        places = ",".join(map(str, cores))
        return {"OMP_NUM_THREADS": str(len(cores)), "OMP_PLACES": f"{{{places}}}", "OMP_PROC_BIND": "true"}
    each = max(1, len(cores) // tensor)
    shares = [cores[worker * each : (worker + 1) * each] for worker in range(tensor)]
    # More workers than cores take turns on the last one.
    bound = "|".join(",".join(map(str, share or cores[-1:])) for share in shares)
    return {"VLLM_CPU_OMP_THREADS_BIND": bound}


def _accelerator_arguments(engine: EngineEnvironment, config: Mapping[str, Any]) -> list[str]:
    rollout = engine.grpo.rollout
    if engine.spec.resources.accelerator is Accelerator.CPU:
        # A prompt that is read in parts takes a random number back; no generator of a CPU can, and the engine dies.
        alone = [f"--distributed-executor-backend={_IN_PROCESS}"] if rollout.tensor == 1 else []
        # The other backend, for processors with AMX, drops a weight of latent attention that an update has to replace.
        latent = ["--attention-backend=CPU_MLA"] if config.get("kv_lora_rank") else []
        memory = [f"--kv-cache-memory-bytes={CPU_ENGINE_CACHE_BYTES}", "--no-enable-chunked-prefill"]
        return [*memory, "--enforce-eager", *alone, *latent]
    sleeps = ["--enable-sleep-mode"] if rollout.placement is RolloutPlacement.COLOCATED else []
    return [
        f"--gpu-memory-utilization={rollout.engine_share}",
        f"--compilation-config={json.dumps(_GRAPHS)}",
        *sleeps,
    ]
