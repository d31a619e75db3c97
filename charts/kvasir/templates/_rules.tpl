{{/*
The operator's rights, once, for both scopes. No wildcard, no verb without its reason. `tests/it/cluster/rights.rs` compares this list
with the verbs of the API server's audit log: a verb that is used and missing, or granted and unused, is red.

`create` stands beside `patch` wherever objects are applied: an apply that makes an object is checked for both.
*/}}
{{- define "kvasir.rules.namespaced" -}}
# The pools: watched, never written. Their spec belongs to people, their replicas to /scale.
- apiGroups: [kvasir.dev]
  resources: [servingpools]
  verbs: [list, watch]
# What the operator says of them.
- apiGroups: [kvasir.dev]
  resources: [servingpools/status]
  verbs: [patch]
# Owner references that block deletion, on clusters that check them (OwnerReferencesPermissionEnforcement).
- apiGroups: [kvasir.dev]
  resources: [servingpools/finalizers]
  verbs: [update]
# Workers are Pods: applied, replaced in the order that devices allow, their image changed in place.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, patch, delete]
# The readiness gate that says that every router knows a worker.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
# What a pool is made of beside its workers. Secrets: the pool's own are made, tenants' keys and registered prefixes are read.
- apiGroups: [""]
  resources: [services, serviceaccounts, secrets, configmaps]
  verbs: [get, list, watch, create, patch, delete]
# Routers.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
# What evictions may take of a pool.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# Who may reach workers and routers.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# One Role per pool lets its routers watch their EndpointSlices and their one Secret. Nobody can grant what they lack: that is why the
# operator itself may read EndpointSlices (below) and Secrets (above).
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# Only in order to hand it on to the routers.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# Devices by claim (dynamic resource allocation); the claims themselves are made from these by Kubernetes.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
# Whether someone else scales a pool that the operator was told to scale.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list]
# Scraping of a pool, on clusters that know the kind.
- apiGroups: [monitoring.coreos.com]
  resources: [servicemonitors]
  verbs: [get, list, watch, create, patch, delete]
# What happened and why, on the pools.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* What lies outside of namespaces. Without it (scope Namespace) rollouts cannot count free devices, say so, and never surge. */}}
{{- define "kvasir.rules.cluster" -}}
# Free devices, counted when a rollout depends on it: what nodes have.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list]
# What drivers announce, and what is taken of it.
- apiGroups: [resource.k8s.io]
  resources: [resourceslices, resourceclaims]
  verbs: [list]
# Which of the announced devices a pool's class means.
- apiGroups: [resource.k8s.io]
  resources: [deviceclasses]
  verbs: [get]
{{- end -}}

{{/* In the operator's own namespace, in both scopes: who leads. */}}
{{- define "kvasir.rules.lease" -}}
# A name cannot be asked for at creation.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
# This one Lease and no other.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "kvasir.operator.name" . }}]
  verbs: [get, update]
{{- end -}}
