{{- define "moejob.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* A setting of the operator: list NAME VALUE. Lists and numbers as JSON: toString would write a million as 1e+06. */}}
{{- define "moejob.setting" -}}
{{- $value := index . 1 }}
- name: MOEJOB_OPERATOR_{{ index . 0 | snakecase | upper }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}

{{- define "moejob.environment" -}}
{{- with .Values.namespaces }}
{{- include "moejob.setting" (list "namespaces" .) }}
{{- end }}
{{- range $name := list "trainer" "trainerColocated" "rollout" }}
{{- include "moejob.setting" (list (printf "%sImage" $name) (include "moejob.image" (list $.Values.images (index $.Values.images $name) $.Chart.AppVersion))) }}
{{- end }}
{{- include "moejob.setting" (list "jobNetworkPolicy" .Values.networkPolicy.jobs) }}
{{- with .Values.networkPolicy.metricsFrom }}
{{- include "moejob.setting" (list "jobMetricsFrom" .) }}
{{- end }}
{{- include "moejob.setting" (list "jobEgress" .Values.networkPolicy.jobsEgress) }}
{{- with .Values.networkPolicy.jobsEgressRules }}
{{- include "moejob.setting" (list "jobEgressRules" .) }}
{{- end }}
{{- with .Values.gpuNodes }}
{{- include "moejob.setting" (list "gpuNodes" .) }}
{{- end }}
{{- with .Values.gpuNodes }}
{{- include "moejob.setting" (list "gpuNodes" .) }}
{{- end }}
{{- $limits := dict }}
{{- range $name, $allowed := .Values.limits }}
{{- if not (kindIs "invalid" $allowed) }}{{ $_ := set $limits $name $allowed }}{{ end }}
{{- end }}
{{- $_ := set $limits "unservedNamespaces" (include "moejob.unserved" . | fromJsonArray) }}
{{- include "moejob.setting" (list "limits" $limits) }}
{{- include "moejob.setting" (list "httpPort" 8080) }}
{{- include "moejob.setting" (list "leaseName" (include "moejob.name" .)) }}
{{- range $name, $value := .Values.leaderElection }}
{{- include "moejob.setting" (list $name $value) }}
{{- end }}
{{- include "moejob.setting" (list "webhook" .Values.webhook.enabled) }}
{{- if .Values.webhook.enabled }}
{{- include "moejob.setting" (list "webhookPort" 9443) }}
{{- include "moejob.setting" (list "webhookService" "moejob-webhook") }}
{{- include "moejob.setting" (list "webhookSecret" (include "moejob.certificate" .)) }}
{{- include "moejob.setting" (list "webhookConfiguration" (include "moejob.hooks" .)) }}
{{- include "moejob.setting" (list "webhookCertificates" .Values.webhook.certificates) }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- include "moejob.setting" (list $name $value) }}
{{- end }}
{{- end }}
