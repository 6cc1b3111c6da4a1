// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/provision"
)

// Labels and annotations of a cell's objects.
const (
	LabelFleet   = "cloister.dev/fleet"
	LabelCell    = "cloister.dev/cell"
	LabelRole    = "cloister.dev/role"
	LabelVersion = "cloister.dev/version"
	// AnnotationGeneration is the generation of the spec that was applied last.
	AnnotationGeneration = "cloister.dev/generation"
	// AnnotationConfig changes with what the processes are told, so that they are replaced.
	AnnotationConfig = "cloister.dev/config"
	// AnnotationDraining is the generation at which the cell was to be emptied.
	AnnotationDraining = "cloister.dev/draining"
)

const (
	servicePort = 8080
	agentPort   = 8443
	stateDir    = "/var/lib/cell"
	channelDir  = "/etc/cell/channel"
	keyDir      = "/etc/cell/admission"
)

// Fleet says where a cell's objects are and what they are told of their fleet.
type Fleet struct {
	// Name is the fleet's, as the certificates have it; Namespace is where the objects
	// are.
	Name, Namespace string
	// Directory is the base URL of the directory's channel listener, https.
	Directory   string
	DefaultCell cells.CellID
	// StorageClass of SQLite stores; "" is the cluster's default.
	StorageClass string
}

type object = map[string]any

// Name is the name of a cell's objects.
func Name(cell cells.CellID) string { return "cell-" + string(cell) }

// Objects returns the manifests of a cell, in the order in which they are applied. The
// error wraps [cells.ErrInvalid], and [provision.ErrUnsupported] for what cannot be made.
func Objects(f Fleet, s provision.Spec) ([]*unstructured.Unstructured, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	unsupported := func(format string, args ...any) error {
		return fmt.Errorf("%w: %w: %s", cells.ErrInvalid, provision.ErrUnsupported, fmt.Sprintf(format, args...))
	}
	engine := s.Store.Engine
	switch {
	case s.Image == "":
		return nil, unsupported("version %s has no image", s.Version)
	case strings.HasSuffix(string(s.Cell), "-"):
		return nil, unsupported("cell %s: a name of Kubernetes does not end with -", s.Cell)
	case engine == "":
		return nil, unsupported("cell %s: say which store it has: none, sqlite or postgres", s.Cell)
	case engine == provision.EngineSQLite && s.Replicas != 1:
		return nil, unsupported("cell %s: an SQLite store is on one volume, which one process has at a time", s.Cell)
	case engine == provision.EnginePostgres && s.Store.DSN.IsZero():
		return nil, unsupported("cell %s: no database is made here; refer to its connection string", s.Cell)
	}
	b := builder{f: f, s: s, name: Name(s.Cell)}
	container, err := b.container()
	if err != nil {
		return nil, err
	}
	config := b.config()
	list := []object{
		b.object("v1", "ServiceAccount", object{"automountServiceAccountToken": false}),
		b.object("v1", "ConfigMap", object{"data": config}),
		b.object("v1", "Service", object{"spec": object{
			"clusterIP": "None", "publishNotReadyAddresses": true, "selector": b.selector(),
			"ports": []any{
				object{"name": "service", "port": int64(servicePort), "targetPort": "service", "protocol": "TCP"},
				object{"name": "agent", "port": int64(agentPort), "targetPort": "agent", "protocol": "TCP"},
			},
		}}),
		b.object("networking.k8s.io/v1", "NetworkPolicy", object{"spec": b.policy()}),
		b.object("policy/v1", "PodDisruptionBudget", object{"spec": object{"maxUnavailable": int64(1), "selector": object{"matchLabels": b.selector()}}}),
		b.workload(container, config),
	}
	out := make([]*unstructured.Unstructured, len(list))
	for i, o := range list {
		out[i] = &unstructured.Unstructured{Object: o}
	}
	return out, nil
}

type builder struct {
	f    Fleet
	s    provision.Spec
	name string
}

func (b *builder) selector() object {
	return object{LabelFleet: b.f.Name, LabelCell: string(b.s.Cell)}
}

func (b *builder) labels() object {
	l := b.selector()
	l["app.kubernetes.io/name"], l["app.kubernetes.io/managed-by"], l[LabelRole] = "cell", Manager, "cell"
	return l
}

func (b *builder) object(version, kind string, rest object) object {
	o := object{"apiVersion": version, "kind": kind, "metadata": object{"name": b.name, "namespace": b.f.Namespace, "labels": b.labels()}}
	maps.Copy(o, rest)
	return o
}

// config is what every process of the cell is told.
func (b *builder) config() object {
	return object{
		"CELL_ID": string(b.s.Cell), "CELL_FLEET": b.f.Name, "CELL_VERSION": b.s.Version,
		"CELL_DIRECTORY_URL": b.f.Directory, "CELL_DEFAULT_CELL": string(b.f.DefaultCell),
		"CELL_CHANNEL_CA": channelDir + "/ca.crt", "CELL_CHANNEL_CERT": channelDir + "/tls.crt", "CELL_CHANNEL_KEY": channelDir + "/tls.key",
		"CELL_ADMISSION_KEY_FILE": keyDir + "/admission.key", "CELL_STATE_DIR": "/var/run/cell",
	}
}

func (b *builder) policy() object {
	from := func(roles ...string) []any {
		values := make([]any, len(roles))
		for i, r := range roles {
			values[i] = r
		}
		return []any{object{"podSelector": object{
			"matchLabels":      object{LabelFleet: b.f.Name},
			"matchExpressions": []any{object{"key": LabelRole, "operator": "In", "values": values}},
		}}}
	}
	port := func(name string) []any { return []any{object{"port": name, "protocol": "TCP"}} }
	return object{
		"podSelector": object{"matchLabels": b.selector()}, "policyTypes": []any{"Ingress"},
		"ingress": []any{
			object{"from": from("edge"), "ports": port("service")},
			object{"from": from("directory", "cell"), "ports": port("agent")},
		},
	}
}

// words replaces those of a command or a variable by what is known in the pod only when
// it runs: the kubelet replaces $(NAME) in turn.
func (b *builder) words() map[string]string {
	w := map[string]string{"listen": fmt.Sprintf("0.0.0.0:%d", servicePort), "store": b.s.Store.Engine, "cell": string(b.s.Cell),
		"version": b.s.Version, "state": stateDir, "dsn": ""}
	switch b.s.Store.Engine {
	case provision.EngineSQLite:
		w["dsn"] = stateDir + "/store.db"
	case provision.EnginePostgres:
		w["dsn"] = "$(CELL_STORE_DSN)"
	}
	return w
}

func (b *builder) container() (object, error) {
	field := func(name, path string) object {
		return object{"name": name, "valueFrom": object{"fieldRef": object{"fieldPath": path}}}
	}
	secret := func(name string, ref provision.SecretRef) object {
		return object{"name": name, "valueFrom": object{"secretKeyRef": object{"name": ref.Name, "key": ref.Key}}}
	}
	// What others refer to comes first.
	env := []any{field("CELL_POD_IP", "status.podIP"), field("CELL_POD", "metadata.name")}
	if !b.s.Store.DSN.IsZero() {
		env = append(env, secret("CELL_STORE_DSN", b.s.Store.DSN))
	}
	env = append(env,
		object{"name": "CELL_SERVICE_URL", "value": fmt.Sprintf("http://$(CELL_POD_IP):%d", servicePort)},
		object{"name": "CELL_AGENT_ADDR", "value": fmt.Sprintf("$(CELL_POD_IP):%d", agentPort)},
		object{"name": "CELL_AGENT_URL", "value": fmt.Sprintf("https://$(CELL_POD_IP):%d", agentPort)})
	words := b.words()
	for _, k := range slices.Sorted(maps.Keys(b.s.Env)) {
		v, err := provision.Expand(b.s.Env[k], words)
		if err != nil {
			return nil, fmt.Errorf("variable %s: %w", k, err)
		}
		env = append(env, object{"name": k, "value": v})
	}
	for _, k := range slices.Sorted(maps.Keys(b.s.Secrets)) {
		env = append(env, secret(k, b.s.Secrets[k]))
	}
	probe := func(path string, every, fails int64) object {
		return object{"httpGet": object{"path": path, "port": "service", "scheme": "HTTP"}, "periodSeconds": every, "failureThreshold": fails, "timeoutSeconds": int64(2)}
	}
	c := object{
		"name": "service", "image": b.s.Image,
		"envFrom": []any{object{"configMapRef": object{"name": b.name}}}, "env": env,
		"ports": []any{
			object{"name": "service", "containerPort": int64(servicePort), "protocol": "TCP"},
			object{"name": "agent", "containerPort": int64(agentPort), "protocol": "TCP"},
		},
		"readinessProbe": probe("/readyz", 1, 1), "livenessProbe": probe("/livez", 10, 6),
		"volumeMounts": []any{
			object{"name": "channel", "mountPath": channelDir, "readOnly": true},
			object{"name": "admission", "mountPath": keyDir, "readOnly": true},
			object{"name": "run", "mountPath": "/var/run/cell"},
			object{"name": "tmp", "mountPath": "/tmp"},
			object{"name": "state", "mountPath": stateDir},
		},
		"securityContext": object{"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": object{"drop": []any{"ALL"}}},
	}
	if len(b.s.Command) > 0 {
		var command []any
		for _, a := range b.s.Command {
			v, err := provision.Expand(a, words)
			if err != nil {
				return nil, fmt.Errorf("command %q: %w", a, err)
			}
			command = append(command, v)
		}
		c["command"] = command
	}
	return c, nil
}

// workload is the Deployment or StatefulSet.
func (b *builder) workload(container, config object) object {
	labels := b.labels()
	labels[LabelVersion] = b.s.Version
	text, _ := json.Marshal(config) // strings always marshal
	sum := sha256.Sum256(text)
	volumes := []any{
		object{"name": "channel", "secret": object{"secretName": b.name + "-channel"}},
		object{"name": "admission", "secret": object{"secretName": b.name + "-admission"}},
		object{"name": "run", "emptyDir": object{}}, object{"name": "tmp", "emptyDir": object{}},
	}
	pod := object{
		"serviceAccountName": b.name, "automountServiceAccountToken": false, "enableServiceLinks": false,
		"terminationGracePeriodSeconds": int64(30),
		"securityContext":               object{"runAsNonRoot": true, "runAsUser": int64(65532), "fsGroup": int64(65532), "seccompProfile": object{"type": "RuntimeDefault"}},
		"containers":                    []any{container}, "volumes": volumes,
	}
	spec := object{
		"replicas": int64(b.s.Replicas), "selector": object{"matchLabels": b.selector()},
		"template": object{"metadata": object{"labels": labels, "annotations": object{AnnotationConfig: hex.EncodeToString(sum[:8])}}, "spec": pod},
	}
	kind := "Deployment"
	if b.s.Store.Engine == provision.EngineSQLite {
		kind = "StatefulSet"
		size := b.s.Store.Size
		if size == "" {
			size = "10Gi"
		}
		claim := object{"accessModes": []any{"ReadWriteOnce"}, "resources": object{"requests": object{"storage": size}}}
		if b.f.StorageClass != "" {
			claim["storageClassName"] = b.f.StorageClass
		}
		spec["serviceName"] = b.name
		spec["volumeClaimTemplates"] = []any{object{"apiVersion": "v1", "kind": "PersistentVolumeClaim",
			"metadata": object{"name": "state", "labels": b.labels()}, "spec": claim}}
	} else {
		pod["volumes"] = append(volumes, object{"name": "state", "emptyDir": object{}})
		spec["strategy"] = object{"type": "RollingUpdate", "rollingUpdate": object{"maxSurge": int64(1), "maxUnavailable": int64(0)}}
		spec["revisionHistoryLimit"] = int64(3)
	}
	o := b.object("apps/v1", kind, object{"spec": spec})
	o["metadata"].(object)["annotations"] = object{AnnotationGeneration: fmt.Sprint(b.s.Generation)}
	return o
}
