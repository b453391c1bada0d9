{{- define "fabric.labels" -}}
app.kubernetes.io/part-of: fabric
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/instance: {{ .Release.Name }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "fabric.lighthouses" -}}
{{- $urls := list -}}
{{- range $i := until (int .Values.lighthouse.replicas) -}}
{{- $urls = append $urls (printf "http://fabric-lighthouse-%d.fabric-lighthouse:8600" $i) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end }}

{{- define "fabric.store" -}}
{{- $members := list -}}
{{- range $i := until (int .Values.etcd.replicas) -}}
{{- $members = append $members (printf "fabric-etcd-%d.fabric-etcd:2379" $i) -}}
{{- end -}}
{{- .Values.store | default (printf "etcd://%s" (join "," $members)) -}}
{{- end }}

{{- define "fabric.initialCluster" -}}
{{- $members := list -}}
{{- range $i := until (int .Values.etcd.replicas) -}}
{{- $members = append $members (printf "fabric-etcd-%d=http://fabric-etcd-%d.fabric-etcd:2380" $i $i) -}}
{{- end -}}
{{- join "," $members -}}
{{- end }}
