{{/* Base of all names: the release's name, said once. At most 52 characters, so that every suffix below fits into 63. */}}
{{- define "kvasir.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "kvasir" .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-kvasir" (.Release.Name | trunc 45 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "kvasir.operator.name" -}}
{{- printf "%s-operator" (include "kvasir.fullname" .) -}}
{{- end -}}

{{- define "kvasir.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "kvasir.operator.name" .) -}}
{{- end -}}

{{/*
Labels that select pods. They never change over the life of a release: no chart version, no app version, and nothing from values,
because a selector cannot be changed in place.
Takes {root, component}.
*/}}
{{- define "kvasir.selectorLabels" -}}
app.kubernetes.io/name: kvasir
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of every object. Takes {root, component}. */}}
{{- define "kvasir.labels" -}}
{{ include "kvasir.selectorLabels" . }}
app.kubernetes.io/part-of: kvasir
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* A whole image reference: registry, repository, then digest if there is one, else tag. Takes {root, name}. */}}
{{- define "kvasir.image" -}}
{{- $image := index .root.Values.images .name -}}
{{- $registry := .root.Values.global.imageRegistry | default .root.Values.images.registry -}}
{{- $path := list $registry $image.repository | compact | join "/" -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $path $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $path ($image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* What the restricted Pod Security Standard asks of a pod. 65532 is the user of the images. */}}
{{- define "kvasir.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* What the restricted Pod Security Standard asks of a container, and a root file system that cannot be written. */}}
{{- define "kvasir.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
