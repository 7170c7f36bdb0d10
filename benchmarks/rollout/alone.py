"""vLLM alone: prompts through its own offline interface, in its environment, with the settings of our engines.

    python -m benchmarks.rollout.alone FILE

FILE holds settings as JSON. Each line of stdin is a round of prompts; the answer is a line with its tokens a second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Other lines are vLLM's.
MARK = "tokens a second: "


def main() -> None:
    """Generate round after round, until there are no more."""
    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ.update(asked["environment"])
    from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415  # reads its environment when imported

    engine = LLM(**asked["settings"])
    for line in sys.stdin:
        prompts = [TokensPrompt(prompt_token_ids=one) for one in json.loads(line)]
        params = [SamplingParams(seed=place, detokenize=False, **asked["sampling"]) for place in range(len(prompts))]
        begun = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        sys.stdout.write(f"{MARK}{tokens / (time.perf_counter() - begun)}\n")
        sys.stdout.flush()


# Its engine is a process that imports this file again.
if __name__ == "__main__":
    main()
