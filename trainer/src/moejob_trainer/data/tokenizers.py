"""The source of a model's tokenizer: moejob itself, a mounted claim, a folder, or the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moejob_api.contract import pods
from moejob_api.job.claims import is_claim_path
from moejob_trainer.data import tiny
from moejob_trainer.data.links import require_contained_links
from moejob_trainer.errors import BadData

CLAIMS = Path(pods.PodPath.CLAIMS)
_CLAIM = "pvc://"


def load_tokenizer(
    source: str, revision: str | None = None, trust_remote_code: bool = False, claims: Path = CLAIMS
) -> PreTrainedTokenizerBase:
    """The tokenizer of spec.model, which is needed wherever text is read or written."""
    if source == tiny.TOKENIZER:
        return tiny.build_tokenizer()
    location = locate_source(source, claims)
    if location.startswith("/") and not Path(location).is_dir():
        raise BadData(f"there is no folder {location} to read the tokenizer of model.source {source} from")
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            location, revision=revision, trust_remote_code=trust_remote_code
        )
    # What Transformers raises for files that are missing, broken, of an unknown kind, or code that is not allowed.
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        raise BadData(_missing_tokenizer_message(source, location, error)) from error
    # Without files Transformers may make a tokenizer of special tokens alone, which turns every text into nothing.
    if loaded.get_vocab().keys() <= loaded.get_added_vocab().keys():
        raise BadData(_missing_tokenizer_message(source, location, "its files hold no vocabulary"))
    return loaded


def locate_source(source: str, claims: Path = CLAIMS) -> str:
    """Return a source's path on this machine: claims are mounted under one folder, everything else keeps its name.

    BadData for a folder with a link that leads out of it.
    """
    location = _source_path(source, claims)
    require_contained_links(Path(location))
    return location


def _source_path(source: str, claims: Path) -> str:
    if not source.startswith(_CLAIM):
        return source
    claim, _, path = source.removeprefix(_CLAIM).partition("/")
    if not is_claim_path(source):
        raise BadData(f"{source} does not name a path inside a claim; write pvc://claim/path")
    claim_folder = claims / claim
    if not claim_folder.is_dir():
        raise BadData(
            f"claim {claim} of {source} is not mounted at {claim_folder}; in a cluster the operator mounts it, "
            "`moejob run` has no claims: name a path on this machine"
        )
    return str(claim_folder / path)


def _missing_tokenizer_message(source: str, location: str, error: Exception | str) -> str:
    reason = str(error).strip().partition("\n")[0]
    return (
        f"no tokenizer can be read from {location} (model.source {source}): {reason}; put tokenizer.json and "
        "tokenizer_config.json beside the weights, or download the model to the volume and name its path"
    )
