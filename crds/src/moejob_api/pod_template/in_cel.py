"""The fields of templates in CEL: the API server refuses a template whose fields no limit would see."""

from __future__ import annotations

from moejob_api.pod_template.fields import Container, Template, TemplateMetadata, TemplateSpec, Volume, field_names

_ROLES = ("trainer", "rollout")


def template_fields_cel() -> str:
    """CEL about a spec: its templates are for pods that it has, and their fields are known."""
    engines = "(has(self.grpo) && self.grpo.rollout.placement == 'Separate')"
    has_pods = f"(!has(self.podTemplate.rollout) || {engines})"
    return f"!has(self.podTemplate) || ({has_pods} && {_known_fields_cel('self')})"


def profile_templates_cel() -> str:
    """CEL about a profile: the fields of its templates are known."""
    return f"!has(object.spec.podTemplate) || {_known_fields_cel('object.spec')}"


def _known_fields_cel(spec: str) -> str:
    """CEL: templates have known fields at each level that a limit looks at."""
    # One list of the templates that are there, so that each check stands in the rule once, whatever the roles.
    templates = " + ".join(f"(has({spec}.podTemplate.{role}) ? [{spec}.podTemplate.{role}] : [])" for role in _ROLES)
    lists = (("containers", Container), ("initContainers", Container), ("volumes", Volume))
    inner = " && ".join(
        f"(!has(t.spec.{name}) || t.spec.{name}.all(i, i.all(k, k in {field_names(model)})))" for name, model in lists
    )
    known_fields = " && ".join(
        (
            f"t.all(k, k in {field_names(Template)})",
            f"(!has(t.metadata) || t.metadata.all(k, k in {field_names(TemplateMetadata)}))",
            f"(!has(t.spec) || (t.spec.all(k, k in {field_names(TemplateSpec)}) && {inner}))",
        )
    )
    return f"({templates}).all(t, {known_fields})"


def template_variables_cel() -> dict[str, str]:
    """Variables of the policy of limits, by their names: what the templates of a job hold, flat."""
    variables: dict[str, str] = {}
    for role in _ROLES:
        template = f"object.spec.podTemplate.{role}"
        has_template = f"has(object.spec.podTemplate) && has({template})"
        for part, name in (("labels", f"{role}Labels"), ("annotations", f"{role}Annotations")):
            path = f"{template}.metadata.{part}"
            variables[name] = f"{has_template} && has({template}.metadata) && has({path}) ? {path} : {{}}"
        variables[f"{role}Spec"] = f"{has_template} && has({template}.spec) ? {template}.spec : {{}}"
    specs = [f"variables.{role}Spec" for role in _ROLES]
    variables["podSpecs"] = f"[{', '.join(specs)}]"
    for name, parts in (("containers", ("containers", "initContainers")), ("volumes", ("volumes",))):
        variables[name] = " + ".join(f"(has({spec}.{part}) ? {spec}.{part} : [])" for spec in specs for part in parts)
    return variables
