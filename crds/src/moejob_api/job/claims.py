"""Volume claims that the sources of a job name as pvc://claim/path: they are mounted to be read, never written."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.job import Spec

SCHEME = "pvc://"


def is_claim_path(source: str) -> bool:
    """Return whether a source of this scheme names a claim and nothing outside of it."""
    # Of pvc://claim/a/b the path is a/b; pvc://claim//etc and pvc://claim/../b would lead out of the mount.
    claim, _, path = source.removeprefix(SCHEME).partition("/")
    return claim not in {"", ".", ".."} and not path.startswith("/") and ".." not in path.split("/")


def unusable_sources(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the path of each field whose source names no path inside a claim, with the source."""
    yield from (
        (path, source) for path, source in _job_sources(spec) if source.startswith(SCHEME) and not is_claim_path(source)
    )


def claims_of_sources(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield each claim that a source names, with the path of the field that does."""
    for path, source in _job_sources(spec):
        if source.startswith(SCHEME):
            yield path, source.removeprefix(SCHEME).partition("/")[0]


def named_claims(spec: Spec) -> tuple[str, ...]:
    """The claims that sources name, each once, in the order they are named."""
    return tuple(dict.fromkeys(claim for _, claim in claims_of_sources(spec)))


def _job_sources(spec: Spec) -> Iterator[tuple[str, str]]:
    yield "spec.model.source", spec.model.source
    if spec.model.config is not None:
        yield "spec.model.config", spec.model.config
    for name, datasets in (("train", spec.data.train), ("eval", spec.data.eval)):
        yield from ((f"spec.data.{name}[{index}].source", dataset.source) for index, dataset in enumerate(datasets))
    if spec.checkpoint.resume_from is not None:
        yield "spec.checkpoint.resumeFrom", spec.checkpoint.resume_from
