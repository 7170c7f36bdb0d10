"""The tokens that end an answer, as a published model names them: a chat model often has more than its tokenizer."""

from __future__ import annotations

from pathlib import Path

from moejob_trainer.errors import BadConfiguration
from moejob_trainer.runtime.json_files import read_json


def published_end_tokens(folder: Path) -> list[int]:
    """Return the tokens that end an answer by the model's generation_config.json, where there is one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        settings = read_json(path)
    except ValueError as error:
        raise BadConfiguration(f"{path} is not JSON ({error}); download it again, or remove it") from error
    ends = settings.get("eos_token_id") if isinstance(settings, dict) else None
    tokens = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(token, int) for token in tokens):
        raise BadConfiguration(
            f"eos_token_id of {path} is {str(ends)[:100]}; it has to be a token's number, or several"
        )
    return tokens
