"""Says what plain vLLM answers greedily with a model folder: no plugin of ours, no server, weights from its files.

.venv/rollout/bin/python tests/rollout/greedy.py FOLDER '[[1, 2, 3], [4, 5]]' 8
"""

from __future__ import annotations

import json
import os
import sys

# Read when vLLM is imported. Without a compiler of C++, and with a cache that fits beside other tests.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}

from vllm import LLM, SamplingParams


def greedy(folder: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return that many tokens for each prompt."""
    model = LLM(folder, dtype="float32", max_model_len=256, enforce_eager=True, disable_log_stats=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    return [list(said.outputs[0].token_ids) for said in model.generate(asked, params, use_tqdm=False)]


if __name__ == "__main__":
    folder, prompts, count = sys.argv[1:]
    sys.stdout.write(f"\n{json.dumps(greedy(folder, json.loads(prompts), int(count)))}\n")
