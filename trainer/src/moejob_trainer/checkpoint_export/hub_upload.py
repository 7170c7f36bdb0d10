"""`python -m moejob_trainer.checkpoint_export.hub_upload`, which `moejob push` starts.

FOLDER --to OWNER/NAME [--private] [--revision BRANCH] [--message TEXT] [--shares-to FD]

Weights go up file by file, and one commit names them all at the end: until then a reader of the hub sees nothing of
them, and an upload that broke off sends again only what is not there.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from httpx import HTTPError
from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils.tqdm import disable_progress_bars

from moejob_api.contract.pods import ExitCode
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.runtime.heartbeats import ShareReport
from moejob_trainer.runtime.share_display import open_share_display

_UNAUTHORIZED, _FORBIDDEN = 401, 403


def main(arguments: Sequence[str] | None = None) -> int:
    """Upload; print one line, or what is wrong."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    options = _build_parser().parse_args(arguments)
    try:
        address = upload_folder(options, open_share_display("uploading", options.shares_to))
    except (BadConfiguration, HFValidationError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return ExitCode.BAD_CONFIGURATION
    except (HTTPError, OSError) as error:
        print(describe_failure(error, options.to), file=sys.stderr)  # noqa: T201
        return 1
    print(f"pushed {options.folder} to {address}")  # noqa: T201
    return ExitCode.DONE


def upload_folder(options: argparse.Namespace, report_share: ShareReport) -> str:
    """Make a commit of a folder, and return its address."""
    if constants.is_offline_mode():
        raise BadConfiguration("HF_HUB_OFFLINE is set, so nothing is sent to a hub; unset it to push")
    if get_token() is None:
        raise BadConfiguration(
            "there is no token of the hub; set HF_TOKEN to one that may write, or run `hf auth login`"
        )
    files = list_files(options.folder)
    operations = [CommitOperationAdd(str(path.relative_to(options.folder)), path) for path in files]
    hub, total_bytes, done_bytes = HfApi(), sum(path.stat().st_size for path in files), 0
    hub.create_repo(options.to, private=options.private or None, exist_ok=True)
    if options.revision is not None:
        hub.create_branch(options.to, branch=options.revision, exist_ok=True)
    for path, operation in zip(files, operations, strict=True):
        hub.preupload_lfs_files(options.to, [operation], revision=options.revision)
        done_bytes += path.stat().st_size
        report_share(done_bytes, total_bytes)
    commit = hub.create_commit(options.to, operations, commit_message=options.message, revision=options.revision)
    return str(commit.commit_url)


def list_files(folder: Path) -> list[Path]:
    """Return the files of a model; what begins with a dot is no part of it, nor is what a link leads to elsewhere."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def describe_failure(error: Exception, name: str) -> str:
    """Explain a refusal of the hub, or that it does not answer."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == _UNAUTHORIZED:
        return f"{constants.ENDPOINT} does not accept the token; set HF_TOKEN to another one, or run `hf auth login`"
    if status == _FORBIDDEN:
        return (
            f"the token may not write {name} at {constants.ENDPOINT}; take one with the right to write, or another name"
        )
    if isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} refuses {name}: {str(error).splitlines()[0]}"
    return f"{constants.ENDPOINT} does not answer: {error}"


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moejob_trainer.checkpoint_export.hub_upload")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", required=True)
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--revision")
    parser.add_argument("--message", default="Upload the model")
    parser.add_argument("--shares-to", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
