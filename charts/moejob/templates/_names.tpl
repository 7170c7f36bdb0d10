{{/*
Names are fixed, whatever the release is called: two operators that would serve the same jobs want the same names, and
Helm refuses the second. Only what has no namespace is named after the release's where an operator serves some namespaces.
*/}}
{{- define "moejob.name" -}}moejob-operator{{- end }}

{{- define "moejob.clusterName" -}}
{{ include "moejob.name" . }}{{ if .Values.namespaces }}-{{ .Release.Namespace }}{{ end }}
{{- end }}

{{- define "moejob.hooks" -}}
moejob{{ if .Values.namespaces }}-{{ .Release.Namespace }}{{ end }}
{{- end }}

{{- define "moejob.certificate" -}}moejob-webhook-certificate{{- end }}

{{- define "moejob.selected" -}}
app.kubernetes.io/name: moejob
app.kubernetes.io/component: operator
{{- end }}

{{- define "moejob.common" -}}
app.kubernetes.io/name: moejob
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "moejob.labels" -}}
{{ include "moejob.common" . }}
app.kubernetes.io/component: operator
{{- end }}

{{/* Namespaces that are not served, as JSON: a namespace that `namespaces` names is. */}}
{{- define "moejob.unserved" -}}
{{- $unserved := .Values.limits.unservedNamespaces }}
{{- if not .Values.serveOwnNamespace }}{{ $unserved = append $unserved .Release.Namespace }}{{ end }}
{{- if .Values.namespaces }}{{ $unserved = list }}{{ end }}
{{- $unserved | uniq | toJson }}
{{- end }}

{{/* An image: list VALUES NAME DEFAULT-TAG. */}}
{{- define "moejob.image" -}}
{{- $images := index . 0 }}{{ $name := index . 1 }}
{{- with $images.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $name }}
{{- if not (contains "@" $name) }}:{{ $images.tag | default (index . 2) }}{{ end }}
{{- end }}

{{/* Rules for one role, on jobs and what is made for them. */}}
{{- define "moejob.jobRules" -}}
- apiGroups: [moejob.dev]
  resources: [moetrainingjobs]
  verbs: [list, watch, delete]
- apiGroups: [moejob.dev]
  resources: [moetrainingjobs/status]
  verbs: [update]
- apiGroups: [moejob.dev]
  resources: [moetrainingprofiles]
  verbs: [get]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services, persistentvolumeclaims]
  verbs: [get, list, watch, create]
# Never read: a right to read Secrets would be one to read every one of them. Who may create pods can use any of a
# namespace as it is, so that creating them adds nothing.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- if .Values.networkPolicy.jobs }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create]
{{- end }}
- apiGroups: [scheduling.k8s.io, scheduling.volcano.sh, scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [get, list, create]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* No Role gives what belongs to no namespace. */}}
{{- define "moejob.clusterProfileRules" -}}
- apiGroups: [moejob.dev]
  resources: [clustermoetrainingprofiles]
  verbs: [get]
{{- end }}

{{- define "moejob.nodeRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get]
{{- end }}

{{/* cert-manager puts the authority in by itself. */}}
{{- define "moejob.hookRules" -}}
- apiGroups: [admissionregistration.k8s.io]
  resources: [validatingwebhookconfigurations]
  resourceNames: [{{ include "moejob.hooks" . }}]
  verbs: [get, patch]
{{- end }}

{{- define "moejob.subjects" -}}
- kind: ServiceAccount
  name: {{ include "moejob.name" . }}
  namespace: {{ .Release.Namespace | quote }}
{{- end }}

{{/* What no schema can say. */}}
{{- define "moejob.checked" -}}
{{- $terms := .Values.leaderElection }}
{{- if gt (addf $terms.renewDeadlineSeconds 1) (float64 $terms.leaseSeconds) }}
{{- fail (printf "leaderElection: renewDeadlineSeconds %v must be at least a second less than leaseSeconds %v: a leader has to stop before another may begin" $terms.renewDeadlineSeconds $terms.leaseSeconds) }}
{{- end }}
{{- if gt (mulf 2 $terms.retrySeconds) (float64 $terms.renewDeadlineSeconds) }}
{{- fail (printf "leaderElection: retrySeconds %v must be at most half of renewDeadlineSeconds %v: one lost renewal must not end a leader" $terms.retrySeconds $terms.renewDeadlineSeconds) }}
{{- end }}
{{- if and .Values.networkPolicy.jobsEgress (not .Values.networkPolicy.jobs) }}
{{- fail "networkPolicy.jobsEgress is a part of the policy of each job, and networkPolicy.jobs is off; set it to true, or jobsEgress to false" }}
{{- end }}
{{- if and .Values.networkPolicy.jobsEgressRules (not .Values.networkPolicy.jobsEgress) }}
{{- fail "networkPolicy.jobsEgressRules has rules for connections that nothing bounds; set networkPolicy.jobsEgress to true, or remove them" }}
{{- end }}
{{- if and .Values.webhook.issuerRef (ne .Values.webhook.certificates "CertManager") }}
{{- fail (printf "webhook.issuerRef names an issuer of cert-manager, but webhook.certificates is %s; set it to CertManager, or remove issuerRef" .Values.webhook.certificates) }}
{{- end }}
{{- if and .Values.namespaces .Values.webhook.enabled (ne .Values.webhook.certificates "CertManager") }}
{{- fail (printf "namespaces are %s, and webhook.certificates %s needs a right beyond them, to patch a webhook configuration of the cluster; set webhook.certificates to CertManager, or webhook.enabled to false" (toJson .Values.namespaces) .Values.webhook.certificates) }}
{{- end }}
{{- end }}
