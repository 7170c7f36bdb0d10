"""The fields of a pod that a template may set, with their bounds: a field that is not here is refused.

Each field either changes nothing outside of its pod, or a limit of the installation covers it (rules/limits.py).
"""

from typing import Annotated, Literal

from pydantic import Field

from moejob_api.job.base import (
    AbsolutePath,
    ApiModel,
    CountOrZero,
    LongText,
    ObjectName,
    QualifiedName,
    Quantity,
    ShortText,
    TextMap,
)
from moejob_api.job.resources import EnvName, ImagePullPolicy, Toleration

_MOST = Field(max_length=64)
Texts = Annotated[tuple[LongText, ...], Field(max_length=256)]
Keys = Annotated[tuple[ShortText, ...], _MOST]
PortNumber = Annotated[int, Field(ge=1, le=65_535)]
UserNumber = Annotated[int, Field(ge=0, le=2**31 - 1)]
FileMode = Annotated[int, Field(ge=0, le=0o777)]
LabelName = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
Amounts = dict[QualifiedName, Quantity]


class LabelRequirement(ApiModel):
    """One expression of a label selector."""

    key: QualifiedName
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: Keys | None = None


class LabelSelector(ApiModel):
    """A selector of pods of the same namespace."""

    match_labels: TextMap | None = None
    match_expressions: Annotated[tuple[LabelRequirement, ...], _MOST] | None = None


class NodeRequirement(ApiModel):
    """One expression about labels of a node."""

    key: QualifiedName
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: Keys | None = None


class NodeTerm(ApiModel):
    """Expressions that hold together."""

    match_expressions: Annotated[tuple[NodeRequirement, ...], Field(min_length=1, max_length=64)]


class NodeTerms(ApiModel):
    """Terms of which one has to hold."""

    node_selector_terms: Annotated[tuple[NodeTerm, ...], Field(min_length=1, max_length=64)]


class PreferredNode(ApiModel):
    """A term that counts for a node."""

    weight: Annotated[int, Field(ge=1, le=100)]
    preference: NodeTerm


class NodeAffinity(ApiModel):
    """Nodes by their labels."""

    required_during_scheduling_ignored_during_execution: NodeTerms | None = None
    preferred_during_scheduling_ignored_during_execution: Annotated[tuple[PreferredNode, ...], _MOST] | None = None


class PodTerm(ApiModel):
    """Pods of the same namespace, and the domain that is shared with them."""

    label_selector: LabelSelector | None = None
    topology_key: QualifiedName
    match_label_keys: Keys | None = None
    mismatch_label_keys: Keys | None = None


class PreferredPods(ApiModel):
    """A term that counts for a node."""

    weight: Annotated[int, Field(ge=1, le=100)]
    pod_affinity_term: PodTerm


class PodAffinity(ApiModel):
    """Nodes by the pods on them."""

    required_during_scheduling_ignored_during_execution: Annotated[tuple[PodTerm, ...], _MOST] | None = None
    preferred_during_scheduling_ignored_during_execution: Annotated[tuple[PreferredPods, ...], _MOST] | None = None


class Affinity(ApiModel):
    """Placement beside nodes' labels and other pods."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class TopologySpread(ApiModel):
    """One constraint on how pods spread."""

    max_skew: Annotated[int, Field(ge=1, le=65_536)]
    topology_key: QualifiedName
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    label_selector: LabelSelector | None = None
    match_label_keys: Keys | None = None
    min_domains: Annotated[int, Field(ge=1, le=65_536)] | None = None
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    node_taints_policy: Literal["Honor", "Ignore"] | None = None


class ObjectKey(ApiModel):
    """One key of a Secret or ConfigMap."""

    name: ObjectName
    key: ShortText
    optional: bool | None = None


class PodField(ApiModel):
    """A field of the pod."""

    field_path: ShortText
    api_version: Literal["v1"] | None = None


class ContainerResource(ApiModel):
    """An amount that a container requests or may use."""

    resource: ShortText
    container_name: LabelName | None = None
    divisor: Quantity | None = None


class ValueSource(ApiModel):
    """The source of a variable; exactly one is given."""

    secret_key_ref: ObjectKey | None = None
    config_map_key_ref: ObjectKey | None = None
    field_ref: PodField | None = None
    resource_field_ref: ContainerResource | None = None


class Variable(ApiModel):
    """One environment variable, as in Kubernetes."""

    name: EnvName
    value: Annotated[str, Field(max_length=32_768)] | None = None
    value_from: ValueSource | None = None


class SourceObject(ApiModel):
    """A Secret or ConfigMap."""

    name: ObjectName
    optional: bool | None = None


class VariableSource(ApiModel):
    """A Secret or ConfigMap of which each key becomes a variable."""

    prefix: EnvName | None = None
    secret_ref: SourceObject | None = None
    config_map_ref: SourceObject | None = None


class VolumeMount(ApiModel):
    """The place of a volume in a container."""

    name: LabelName
    mount_path: AbsolutePath
    read_only: bool | None = None
    sub_path: Annotated[str, Field(max_length=1024, pattern=r"^[^/]")] | None = None


class ContainerAmounts(ApiModel):
    """Resources of a container."""

    limits: Amounts | None = None
    requests: Amounts | None = None


class Capabilities(ApiModel):
    """Capabilities of a container's processes."""

    add: Annotated[tuple[Annotated[str, Field(max_length=64, pattern=r"^[A-Z_]+$")], ...], _MOST] | None = None
    drop: Annotated[tuple[Annotated[str, Field(max_length=64, pattern=r"^[A-Z_]+$")], ...], _MOST] | None = None


class SecurityProfile(ApiModel):
    """A profile of seccomp or AppArmor."""

    type: Literal["RuntimeDefault", "Unconfined", "Localhost"]
    localhost_profile: LongText | None = None


class ContainerSecurity(ApiModel):
    """Rights of a container's processes."""

    privileged: bool | None = None
    allow_privilege_escalation: bool | None = None
    read_only_root_filesystem: bool | None = None
    run_as_non_root: bool | None = None
    run_as_user: UserNumber | None = None
    run_as_group: UserNumber | None = None
    capabilities: Capabilities | None = None
    seccomp_profile: SecurityProfile | None = None
    app_armor_profile: SecurityProfile | None = None


class Sysctl(ApiModel):
    """A parameter of the kernel."""

    name: ShortText
    value: LongText


class PodSecurity(ApiModel):
    """Rights of all containers' processes."""

    run_as_non_root: bool | None = None
    run_as_user: UserNumber | None = None
    run_as_group: UserNumber | None = None
    fs_group: UserNumber | None = None
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    supplemental_groups: Annotated[tuple[UserNumber, ...], _MOST] | None = None
    seccomp_profile: SecurityProfile | None = None
    app_armor_profile: SecurityProfile | None = None
    sysctls: Annotated[tuple[Sysctl, ...], _MOST] | None = None


class CommandAction(ApiModel):
    """A command in the container."""

    command: Texts


class HttpHeader(ApiModel):
    """A header of a request."""

    name: ShortText
    value: LongText


class HttpAction(ApiModel):
    """A request to the pod itself."""

    path: LongText | None = None
    port: PortNumber
    scheme: Literal["HTTP", "HTTPS"] | None = None
    http_headers: Annotated[tuple[HttpHeader, ...], _MOST] | None = None


class TcpAction(ApiModel):
    """A connection to the pod itself."""

    port: PortNumber


class GrpcAction(ApiModel):
    """A health check of gRPC in the pod itself."""

    port: PortNumber
    service: ShortText | None = None


class Probe(ApiModel):
    """A check of a sidecar."""

    exec: CommandAction | None = None
    http_get: HttpAction | None = None
    tcp_socket: TcpAction | None = None
    grpc: GrpcAction | None = None
    initial_delay_seconds: CountOrZero | None = None
    timeout_seconds: CountOrZero | None = None
    period_seconds: CountOrZero | None = None
    success_threshold: CountOrZero | None = None
    failure_threshold: CountOrZero | None = None


class Pause(ApiModel):
    """A pause before a container ends."""

    seconds: CountOrZero


class Hook(ApiModel):
    """An action when a container starts or ends."""

    exec: CommandAction | None = None
    sleep: Pause | None = None


class ContainerHooks(ApiModel):
    """Hooks of a sidecar."""

    post_start: Hook | None = None
    pre_stop: Hook | None = None


class ContainerPort(ApiModel):
    """A port of a container."""

    container_port: PortNumber
    name: LabelName | None = None
    protocol: Literal["TCP", "UDP", "SCTP"] | None = None
    host_port: PortNumber | None = None


class Container(ApiModel):
    """The container of the trainer or engine, a sidecar, or an init container."""

    name: LabelName
    image: LongText | None = None
    image_pull_policy: ImagePullPolicy | None = None
    command: Texts | None = None
    args: Texts | None = None
    working_dir: AbsolutePath | None = None
    env: Annotated[tuple[Variable, ...], Field(max_length=256)] | None = None
    env_from: Annotated[tuple[VariableSource, ...], _MOST] | None = None
    ports: Annotated[tuple[ContainerPort, ...], _MOST] | None = None
    resources: ContainerAmounts | None = None
    volume_mounts: Annotated[tuple[VolumeMount, ...], _MOST] | None = None
    security_context: ContainerSecurity | None = None
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    lifecycle: ContainerHooks | None = None
    restart_policy: Literal["Always"] | None = None


class EmptyDir(ApiModel):
    """A folder that lives as long as the pod; mediums of huge pages are among them."""

    medium: Annotated[str, Field(max_length=64, pattern=r"^(Memory|HugePages(-[0-9]+(Ki|Mi|Gi))?)?$")] | None = None
    size_limit: Quantity | None = None


class KeyFile(ApiModel):
    """One key of an object as a file."""

    key: ShortText
    path: LongText
    mode: FileMode | None = None


class ConfigMapFiles(ApiModel):
    """A ConfigMap as files."""

    name: ObjectName
    items: Annotated[tuple[KeyFile, ...], _MOST] | None = None
    default_mode: FileMode | None = None
    optional: bool | None = None


class SecretFiles(ApiModel):
    """A Secret as files."""

    secret_name: ObjectName
    items: Annotated[tuple[KeyFile, ...], _MOST] | None = None
    default_mode: FileMode | None = None
    optional: bool | None = None


class FieldFile(ApiModel):
    """A field of the pod as a file."""

    path: LongText
    field_ref: PodField | None = None
    resource_field_ref: ContainerResource | None = None
    mode: FileMode | None = None


class FieldFiles(ApiModel):
    """Fields of the pod as files."""

    items: Annotated[tuple[FieldFile, ...], _MOST] | None = None
    default_mode: FileMode | None = None


class ProjectedObject(ApiModel):
    """A Secret or ConfigMap among others in one folder."""

    name: ObjectName
    items: Annotated[tuple[KeyFile, ...], _MOST] | None = None
    optional: bool | None = None


class ProjectedSource(ApiModel):
    """One source of a folder. No token of a ServiceAccount: pods of jobs have none."""

    secret: ProjectedObject | None = None
    config_map: ProjectedObject | None = None
    downward_api: Annotated[FieldFiles | None, Field(alias="downwardAPI")] = None


class Projection(ApiModel):
    """Several sources in one folder."""

    sources: Annotated[tuple[ProjectedSource, ...], _MOST]
    default_mode: FileMode | None = None


class Claim(ApiModel):
    """A claim that is there."""

    claim_name: ObjectName
    read_only: bool | None = None


class ClaimRequest(ApiModel):
    """The spec of a claim."""

    access_modes: Keys
    resources: ContainerAmounts
    storage_class_name: ObjectName | None = None


class ClaimTemplate(ApiModel):
    """A claim to be made with the pod."""

    spec: ClaimRequest


class EphemeralClaim(ApiModel):
    """A claim that is made and deleted with the pod."""

    volume_claim_template: ClaimTemplate


class HostPath(ApiModel):
    """A path of the node."""

    path: AbsolutePath
    type: (
        Literal["", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket", "CharDevice", "BlockDevice"]
        | None
    ) = None


class Volume(ApiModel):
    """A volume; exactly one source is given."""

    name: LabelName
    empty_dir: EmptyDir | None = None
    config_map: ConfigMapFiles | None = None
    secret: SecretFiles | None = None
    downward_api: Annotated[FieldFiles | None, Field(alias="downwardAPI")] = None
    projected: Projection | None = None
    persistent_volume_claim: Claim | None = None
    ephemeral: EphemeralClaim | None = None
    host_path: HostPath | None = None


class DnsOption(ApiModel):
    """An option of the resolver."""

    name: ShortText
    value: ShortText | None = None


class DnsConfig(ApiModel):
    """The resolver of the pod."""

    nameservers: Keys | None = None
    searches: Keys | None = None
    options: Annotated[tuple[DnsOption, ...], _MOST] | None = None


class HostAlias(ApiModel):
    """Names of an address."""

    ip: ShortText
    hostnames: Keys


class TemplateSpec(ApiModel):
    """The fields of a pod's spec."""

    containers: Annotated[tuple[Container, ...], _MOST] | None = None
    init_containers: Annotated[tuple[Container, ...], _MOST] | None = None
    volumes: Annotated[tuple[Volume, ...], _MOST] | None = None
    affinity: Affinity | None = None
    topology_spread_constraints: Annotated[tuple[TopologySpread, ...], _MOST] | None = None
    node_selector: TextMap | None = None
    tolerations: Annotated[tuple[Toleration, ...], _MOST] | None = None
    host_network: bool | None = None
    host_aliases: Annotated[tuple[HostAlias, ...], _MOST] | None = None
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"] | None = None
    dns_config: DnsConfig | None = None
    runtime_class_name: ObjectName | None = None
    security_context: PodSecurity | None = None


class TemplateMetadata(ApiModel):
    """Further labels and annotations of a pod."""

    labels: Annotated[TextMap, _MOST] | None = None
    annotations: Annotated[TextMap, _MOST] | None = None


class Template(ApiModel):
    """A patch of a pod."""

    metadata: TemplateMetadata | None = None
    spec: TemplateSpec | None = None


def field_names(model: type[ApiModel]) -> list[str]:
    """The fields of a model as a job writes them."""
    return sorted(field.alias or name for name, field in model.model_fields.items())
