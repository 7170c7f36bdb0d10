"""python -m moejob_operator.installed: checks, from where its users are, that an installed operator works.

`helm test` runs it. Creates nothing: jobs are tried with dryRun. Knows the API alone, not how the operator works.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from moejob_api.job import KIND
from moejob_client.api_client import ApiClient
from moejob_client.errors import AlreadyExists, NotFound
from moejob_operator.actions import Kind
from moejob_operator.admission.review import HOOK
from moejob_operator.cluster import Conflict, Forbidden, Retryable
from moejob_operator.kube_api.account import load_account
from moejob_operator.kube_api.live_lists import JOBS, collection_path
from moejob_operator.reachable import report_policies
from moejob_operator.runtime.leader_election import ApiLeaseStore, Lease
from moejob_operator.runtime.metrics import Metrics

# What is wrong; None when nothing is.
Problem = str | None

_PAUSE_SECONDS = 1.0
_REQUEST_SECONDS = 10.0
_POLICY_SECONDS = 30.0
_SPEC: Mapping[str, Any] = {
    "method": "SFT",
    "model": {"source": "moejob/tiny-moe"},
    "data": {"train": [{"source": "moejob/tiny-chats", "format": "Chat"}], "maxLength": 256},
    "parallelism": {"expert": 2},
    "training": {"maxSteps": 1, "globalBatchSize": 8},
    "storage": {"size": "1Gi"},
    "resources": {"accelerator": "CPU", "gpusPerNode": 2},
}
# Four attention heads cannot be split in three.
_WRONG_SPEC = {**_SPEC, "parallelism": {"tensor": 3}, "resources": {"accelerator": "CPU", "gpusPerNode": 3}}


class Installation(BaseSettings):
    """The installation that is checked."""

    model_config = SettingsConfigDict(
        cli_prog_name="python -m moejob_operator.installed",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        frozen=True,
    )

    url: Annotated[str, Field(description="Where the operator serves /readyz.")]
    namespace: Annotated[str, Field(description="A namespace that the operator serves; jobs are tried there.")]
    own_namespace: Annotated[str, Field(description="Where the operator's Lease is.")]
    lease_name: Annotated[str, Field(description="Name of the Lease.")] = "moejob-operator"
    webhook: Annotated[bool, Field(description="Whether wrong jobs have to be denied by the webhook.")] = True
    policy_target: Annotated[
        str | None, Field(description="Host of moejob_operator.reachable, one port of which a NetworkPolicy closes.")
    ] = None
    seconds: Annotated[float, Field(gt=0, description="How long to wait until all is well.")] = 90.0
    kubeconfig: Annotated[
        Path | None, Field(description="How to reach the API server. Absent: as a pod, else as kubectl would.")
    ] = None


@dataclass(frozen=True, slots=True)
class InstallationCheck:
    """A claim about the installation, and the function that looks for a problem with it."""

    claim: str
    problem: Callable[[], Awaitable[Problem]]


def installation_checks(
    installation: Installation, api: ApiClient, http: aiohttp.ClientSession
) -> tuple[InstallationCheck, ...]:
    """Return the checks of an installation, in the order in which its parts come up."""
    lease = ApiLeaseStore(api, installation.own_namespace, installation.lease_name)
    path = f"{collection_path(Kind.JOB, installation.namespace)}?dryRun=All&fieldValidation=Strict"
    versions: set[str] = set()

    async def check_ready() -> Problem:
        async with http.get(f"{installation.url}/readyz") as response:
            return None if response.status == 200 else (await response.text()).strip()

    async def check_leader() -> Problem:
        raw = await lease.read()
        current_lease = None if raw is None else Lease.from_body(raw)
        name = f"the Lease {installation.lease_name} in {installation.own_namespace}"
        if current_lease is None or not current_lease.holder:
            return f"nobody holds {name}"
        # A holder that died stays in the Lease; only one that lives renews it.
        versions.add(current_lease.version)
        return None if len(versions) > 1 else f"{current_lease.holder} holds {name} and has not renewed it"

    async def check_accepted() -> Problem:
        await api.create(path, _job_body(_SPEC))
        return None

    async def check_denied() -> Problem:
        try:
            await api.create(path, _job_body(_WRONG_SPEC))
        except Forbidden as refusal:
            return None if f'admission webhook "{HOOK}" denied' in str(refusal) else str(refusal)
        return f"it was accepted: the API server does not reach the webhook {HOOK}, or does not trust it"

    always = (
        InstallationCheck("the operator is ready", check_ready),
        InstallationCheck("a replica leads", check_leader),
        InstallationCheck("a job that can work is accepted", check_accepted),
    )
    return (
        (*always, InstallationCheck("a job that cannot work is denied", check_denied))
        if installation.webhook
        else always
    )


async def lasting_problem(check: InstallationCheck, deadline: float) -> Problem:
    """Repeat a check until it passes or time is up; return its last problem, None when it has passed."""
    while True:
        try:
            problem = await check.problem()
        except (NotFound, Conflict, AlreadyExists, Forbidden, Retryable, aiohttp.ClientError, TimeoutError) as error:
            problem = str(error) or repr(error)
        if problem is None or asyncio.get_running_loop().time() + _PAUSE_SECONDS > deadline:
            return problem
        await asyncio.sleep(_PAUSE_SECONDS)


async def run_checks(installation: Installation, print_line: Callable[[str], object]) -> bool:
    """Run all checks, report each with its result, and return whether all have passed."""
    deadline = asyncio.get_running_loop().time() + installation.seconds
    credentials = await load_account(installation.kubeconfig)
    api = ApiClient(credentials, Metrics(), concurrency=1, seconds=_REQUEST_SECONDS)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
    problems = []
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            for check in installation_checks(installation, api, http):
                problems.append(await lasting_problem(check, deadline))
                print_line(f"ok: {check.claim}" if problems[-1] is None else f"NOT so: {check.claim}: {problems[-1]}")
        # No failure of the installation, which works on such networks, but no object of the API shows it.
        if installation.policy_target is not None:
            print_line(await report_policies(installation.policy_target, min(_POLICY_SECONDS, installation.seconds)))
    finally:
        await api.close()
    return not any(problems)


def _job_body(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": JOBS, "kind": KIND, "metadata": {"name": "moejob-installed"}, "spec": spec}


def main(arguments: Sequence[str]) -> int:
    """Print each check with its result; 1 when one has failed."""
    installation = Installation(_cli_parse_args=list(arguments))
    is_well = asyncio.run(run_checks(installation, lambda line: sys.stdout.write(f"{line}\n")))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
