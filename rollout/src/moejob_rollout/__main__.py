"""`python -m moejob_rollout`: one engine, from the contract's environment to its end."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from threading import Event
from typing import Any

from moejob_api.contract.pod_environment import BadEnvironment, read_environment
from moejob_api.contract.pods import ExitCode, RunFile
from moejob_rollout.arguments import server_arguments, vllm_variables
from moejob_rollout.engine import EngineEnvironment
from moejob_rollout.listener import server_settings
from moejob_rollout.temporary_files import own_temporary_files

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LOOK_SECONDS = 0.2
# A failure that another start may mend.
_DIED = 1


def main() -> int:
    """Run the engine until it is asked to stop; the exit code of the contract."""
    # Process 1 of a pod loses a signal that it has no handler for.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    # An engine whose launcher was killed would never be asked to stop.
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM, 0, 0, 0)
    try:
        engine = read_environment(EngineEnvironment, os.environ)
    except BadEnvironment as error:
        sys.stderr.write(f"moejob-rollout: {error}\n")
        return ExitCode.BAD_CONFIGURATION
    if "moejob" not in entry_points(group="vllm.general_plugins").names:
        # vLLM would refuse the way that weights take, after a minute.
        sys.stderr.write(
            f"moejob-rollout: vLLM knows plugins of installed packages, and {sys.executable} has only files of this; "
            "install moejob-rollout there, or use its image\n"
        )
        return ExitCode.BAD_CONFIGURATION
    os.environ |= vllm_variables(engine, sorted(os.sched_getaffinity(0)), os.environ)
    with own_temporary_files():
        # Collecting garbage would take a quarter of the import, and all imported objects stay.
        gc.disable()
        # Takes seconds, in which the trainer lays out the model.
        from vllm.entrypoints.launchers.api_server import entry  # noqa: PLC0415  # reads its environment when imported

        gc.freeze()
        gc.enable()
        model = _await_model(engine.run_folder / RunFile.ENGINE_MODEL)
        return _serve_engine(entry, engine, model)


def _await_model(folder: Path) -> Path:
    """Wait for the model, which appears under its name when it is complete."""
    if not folder.is_dir():
        sys.stderr.write(f"moejob-rollout: waiting for the trainer to lay out the model in {folder}\n")
    while not folder.is_dir():
        time.sleep(_LOOK_SECONDS)
    return folder


def _serve_engine(entry: Any, engine: EngineEnvironment, model: Path) -> int:
    """Serve until the server ends. An end without a request to stop is a failure: its core has died."""
    import uvloop  # noqa: PLC0415  # comes with vLLM
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: PLC0415
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    config = json.loads((model / "config.json").read_text("utf-8"))
    cli_env_setup()
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(server_arguments(engine, model, config))
    validate_parsed_serve_args(parsed)
    # vLLM's server ends alike when it is asked to and when its core is gone.
    is_stop_requested = Event()

    class SignalledLoop(uvloop.Loop):
        """An event loop that notes that a signal came."""

        def add_signal_handler(  # type: ignore[override]  # the types of a callback's arguments matter to none here
            self, sig: int, callback: Callable[..., Any], *args: Any
        ) -> None:
            def note_signal() -> None:
                is_stop_requested.set()
                callback(*args)

            super().add_signal_handler(sig, note_signal)

    uvloop.run(entry.run_server(parsed, **server_settings()), loop_factory=SignalledLoop)
    if is_stop_requested.is_set():
        return ExitCode.DONE
    sys.stderr.write("moejob-rollout: the engine's core has ended by itself; its reason is in the log above\n")
    return _DIED


def _exit_on_signal(*_: object) -> None:
    sys.exit(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
