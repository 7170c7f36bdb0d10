"""Ask a model that `moejob run` has exported, with nothing but Transformers: ask.py EXPORT QUESTION."""

from __future__ import annotations

import sys
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, logging

MOST_TOKENS = 32


def ask_model(export: str, question: str) -> str:
    """Return the model's answer, which takes the likeliest token each time."""
    # The folder names the classes of both, which no type checker can know.
    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForCausalLM.from_pretrained(export)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    generated = model.generate(**inputs, max_new_tokens=MOST_TOKENS, do_sample=False)
    text: str = tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


if __name__ == "__main__":
    logging.disable_progress_bar()
    export, question = sys.argv[1:]
    sys.stdout.write(f"{question}\n{ask_model(export, question)}\n")
