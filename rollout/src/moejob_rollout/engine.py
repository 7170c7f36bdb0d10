"""One engine as the contract's environment describes it: a frozen model, parsed once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from moejob_api.contract.addresses import is_loopback
from moejob_api.contract.pod_environment import BadEnvironment, WrittenSpec, require_secret
from moejob_api.contract.pods import Environment, PodRole
from moejob_api.job.grpo import Grpo


class EngineEnvironment(BaseModel):
    """One engine. Each field is the variable of its name in the contract."""

    model_config = ConfigDict(frozen=True)

    spec: WrittenSpec
    role: Literal[PodRole.ROLLOUT]
    # The place of its own address in `rollout_urls`.
    index: Annotated[int, Field(ge=0)]
    host: Annotated[str, Field(min_length=1)]
    run_folder: Path
    rollout_urls: tuple[str, ...]
    secret: str | None = None

    @field_validator("rollout_urls", mode="before")
    @classmethod
    def _split_urls(cls, text: Any) -> Any:
        return tuple(text.split(",")) if isinstance(text, str) else text

    @model_validator(mode="after")
    def _require_engine_of_job(self) -> Self:
        if self.spec.grpo is None:
            raise ValueError(f"{Environment.SPEC}: method {self.spec.method} has no engines; GRPO has")
        if self.index >= len(self.rollout_urls):
            raise ValueError(
                f"{Environment.INDEX} is {self.index}, but {Environment.ROLLOUT_URLS} names {len(self.rollout_urls)}"
            )
        if urlsplit(self.rollout_urls[self.index]).port is None:
            raise ValueError(f"{Environment.ROLLOUT_URLS}: {self.rollout_urls[self.index]} names no port")
        return self

    @model_validator(mode="after")
    def _require_secret_if_reachable(self) -> Self:
        require_secret(self.secret, self.host)
        return self

    @property
    def grpo(self) -> Grpo:
        """Settings of GRPO, which the validation has found to be there."""
        if self.spec.grpo is None:
            raise BadEnvironment(f"{Environment.SPEC} has no grpo")
        return self.spec.grpo

    @property
    def port(self) -> int:
        """The port to listen on."""
        port = urlsplit(self.rollout_urls[self.index]).port
        if port is None:
            raise BadEnvironment(f"{self.rollout_urls[self.index]} names no port")
        return port

    @property
    def listens_on(self) -> str:
        """The address to listen on: loopback alone where the run is on one machine."""
        return self.host if is_loopback(self.host) else "0.0.0.0"  # noqa: S104  # pods are reached by their own address
