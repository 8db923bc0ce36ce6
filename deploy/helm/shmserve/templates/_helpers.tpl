{{- define "shmserve.labels" -}}
app.kubernetes.io/name: shmserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "shmserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (gt (int .Values.gpus.count) 0 | ternary "-gpu" "")) }}
{{- end }}

{{- define "shmserve.probe" -}}
{path: {{ .path }}, port: http{{ if .root.Values.tls.secret }}, scheme: HTTPS{{ end }}}
{{- end }}
