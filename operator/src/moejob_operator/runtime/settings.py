"""The settings of one operator process: flags, else MOEJOB_OPERATOR_* variables, else defaults."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from moejob_api.job.resources import GpuType
from moejob_api.rules.limits import JobLimits
from moejob_operator.runtime.leader_election import LeaseDurations

# Where Kubernetes tells a pod its own namespace.
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

PortNumber = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


# Literals, not StrEnum: --help shows the names of an enumeration, but a user writes its values.
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
# Who makes the webhook's certificate.
Certificates = Literal["SelfSigned", "CertManager"]


def _pod_namespace() -> str:
    return _NAMESPACE.read_text("ascii").strip() if _NAMESPACE.exists() else "default"


class Settings(BaseSettings):
    """Every setting; `python -m moejob_operator --help` lists them."""

    model_config = SettingsConfigDict(
        env_prefix="MOEJOB_OPERATOR_",
        cli_prog_name="moejob-operator",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
    )

    namespaces: Annotated[tuple[str, ...], Field(description="Serve these namespaces only. Absent: all.")] = ()
    kubeconfig: Annotated[
        Path | None, Field(description="How to reach the API server. Absent: as a pod, else as kubectl would.")
    ] = None
    own_namespace: Annotated[
        str, Field(description="Where the operator's Lease and Secret are.", default_factory=_pod_namespace)
    ]
    identity: Annotated[
        str,
        Field(description="Name of this replica.", default_factory=socket.gethostname, min_length=1, max_length=128),
    ]

    trainer_image: Annotated[str, Field(description="Image of trainer pods whose job names none.")] = "moejob-trainer"
    trainer_colocated_image: Annotated[
        str, Field(description="The same where engines share the trainer's pods: it holds the rollout environment too.")
    ] = "moejob-trainer-colocated"
    rollout_image: Annotated[str, Field(description="Image of rollout pods whose job names none.")] = "moejob-rollout"

    job_network_policy: Annotated[
        bool, Field(description="Make a NetworkPolicy for each job, which lets in its own pods and those of the chart.")
    ] = False
    job_metrics_from: Annotated[
        tuple[dict[str, Any], ...], Field(description="Peers of a NetworkPolicy that may read metrics of pods, too.")
    ] = ()

    job_egress: Annotated[
        bool, Field(description="Let the policy of a job also bound what its pods connect to: DNS, one another, 443.")
    ] = False
    job_egress_rules: Annotated[
        tuple[dict[str, Any], ...], Field(description="Egress rules of a NetworkPolicy, for what pods need beside it.")
    ] = ()

    gpu_nodes: Annotated[
        dict[GpuType, dict[str, str]],
        Field(description="Labels of nodes by type of GPU, as JSON; pods whose job names the type get them."),
    ] = {}
    limits: Annotated[JobLimits, Field(description="Names that jobs may ask for, as JSON in a variable.")] = JobLimits()

    workers: Annotated[int, Field(ge=1, description="Jobs reconciled at once.")] = 64
    spacing_seconds: Annotated[float, Field(ge=0, le=60, description="Between two looks at one job.")] = 0.05
    resync_seconds: Annotated[Seconds, Field(description="Every job is looked at this often, whatever happens.")] = (
        120.0
    )
    stop_seconds: Annotated[Seconds, Field(description="What work in hand gets at the end.")] = 20.0

    request_concurrency: Annotated[int, Field(ge=1, description="Requests to the API server at once.")] = 32
    request_seconds: Annotated[Seconds, Field(description="A request that takes longer is given up.")] = 10.0
    progress_seconds: Annotated[
        Seconds, Field(description="A pod that takes longer to say how it is is passed over.")
    ] = 1.5

    leader_election: Annotated[bool, Field(description="Run for leader; without, only one replica may run.")] = True
    lease_name: Annotated[str, Field(description="Name of the Lease.")] = "moejob-operator"
    lease_seconds: Annotated[int, Field(ge=2, description="Others wait this long after a leader was last heard.")] = 13
    renew_deadline_seconds: Annotated[Seconds, Field(description="A leader not heard for this long stops itself.")] = (
        10.0
    )
    retry_seconds: Annotated[Seconds, Field(description="Between two renewals.")] = 2.0

    webhook: Annotated[bool, Field(description="Serve the admission webhook.")] = True
    webhook_port: Annotated[PortNumber, Field(description="Port of the webhook.")] = 9443
    webhook_service: Annotated[str, Field(description="Service that leads to the webhook.")] = "moejob-webhook"
    webhook_secret: Annotated[str, Field(description="Secret with its certificate.")] = "moejob-webhook-certificate"
    webhook_configuration: Annotated[
        str, Field(description="ValidatingWebhookConfiguration whose caBundle the leader keeps.")
    ] = "moejob"
    webhook_certificates: Annotated[Certificates, Field(description="Who makes the certificate.")] = "SelfSigned"

    http_port: Annotated[PortNumber, Field(description="Port of /healthz, /readyz and /metrics.")] = 8080
    log_level: Annotated[LogLevel, Field(description="Lines below this level are not written.")] = "INFO"
    log_format: Annotated[Literal["JSON", "Text"], Field(description="How lines are written.")] = "JSON"

    @model_validator(mode="after")
    def _leaders_stop_in_time(self) -> Self:
        if self.renew_deadline_seconds + 1 > self.lease_seconds:
            raise ValueError(
                f"renew_deadline_seconds {self.renew_deadline_seconds:g} must be at least a second less than "
                f"lease_seconds {self.lease_seconds}: a leader has to stop before another may begin"
            )
        if 2 * self.retry_seconds > self.renew_deadline_seconds:
            raise ValueError(
                f"retry_seconds {self.retry_seconds:g} must be at most half of renew_deadline_seconds "
                f"{self.renew_deadline_seconds:g}: one lost renewal must not end a leader"
            )
        return self

    @property
    def job_limits(self) -> JobLimits:
        """The limits of jobs. A namespace that the settings name is served, whatever its name."""
        return self.limits.model_copy(update={"unserved_namespaces": ()}) if self.namespaces else self.limits

    @property
    def lease_durations(self) -> LeaseDurations:
        """The terms of the election."""
        return LeaseDurations(self.lease_seconds, self.renew_deadline_seconds, self.retry_seconds)


def read_settings(arguments: Sequence[str]) -> Settings:
    """The settings of a process started with these arguments; ends the process on --help and on mistakes."""
    try:
        return Settings(_cli_parse_args=list(arguments))
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False):
            flag = "".join(f"--{str(name).replace('_', '-')}: " for name in problem["loc"])
            sys.stderr.write(f"moejob-operator: {flag}{problem['msg'].removeprefix('Value error, ')}\n")
        sys.exit(2)


def unique_identity(identity: str) -> str:
    """An identity that no other process has, nor this pod had before a restart."""
    return f"{identity}_{uuid4().hex[:8]}"
