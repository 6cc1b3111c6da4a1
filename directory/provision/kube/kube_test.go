// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/directory/provision/kube"
	"github.com/cloister-dev/cloister/directory/provision/provisiontest"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

func TestMain(m *testing.M) { flag.Parse(); goleak.VerifyTestMain(m) }

var fleet = kube.Fleet{Name: "prod", Namespace: "cells", Directory: "https://directory.cells.svc:7443", DefaultCell: "c0"}

var deployments = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}

func newScheme(t interface {
	Fatalf(string, ...any)
}) *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, corev1.AddToScheme, networkingv1.AddToScheme, policyv1.AddToScheme} {
		if err := add(s); err != nil {
			t.Fatalf("%v", err)
		}
	}
	return s
}

// cluster is client-go's fake with managed fields, and a controller that moves
// deployments on as the real one does: one process more, and one less.
type cluster struct {
	t      provisiontest.TB
	client dynamic.Interface
	broken sync.Map // images that never become ready
}

func newCluster(t provisiontest.TB) *cluster {
	scheme := newScheme(t)
	tracker := clienttesting.NewFieldManagedObjectTracker(scheme, serializer.NewCodecFactory(scheme).UniversalDecoder(), managedfields.NewDeducedTypeConverter())
	fake := dynamicfake.NewSimpleDynamicClient(scheme)
	var mu sync.Mutex
	react := clienttesting.ObjectReaction(tracker)
	specs := map[string]string{} // of each deployment, as it was last seen
	fake.PrependReactor("*", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock() // a change and what a server adds to it are one
		defer mu.Unlock()
		handled, o, err := react(a)
		if err != nil || o == nil {
			return handled, o, err
		}
		if d, ok := o.(*appsv1.Deployment); ok && a.GetVerb() == "patch" {
			if o, err = numbered(tracker, specs, d); err != nil {
				return handled, nil, err
			}
		}
		u, err := untyped(scheme, o)
		return handled, u, err
	})
	c := &cluster{t: t, client: fake}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); c.control(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return c
}

// numbered gives a deployment another generation when its spec has changed, as a server
// does.
func numbered(tracker clienttesting.ObjectTracker, specs map[string]string, d *appsv1.Deployment) (runtime.Object, error) {
	text, err := json.Marshal(d.Spec)
	if err != nil || specs[d.Name] == string(text) {
		return d, err
	}
	specs[d.Name] = string(text)
	d = d.DeepCopy()
	d.Generation++
	if err := tracker.Update(deployments, d, d.Namespace, metav1.UpdateOptions{FieldManager: "server"}); err != nil {
		return nil, err
	}
	return tracker.Get(deployments, d.Namespace, d.Name)
}

// untyped is what the dynamic client gets of the tracker's objects.
func untyped(scheme *runtime.Scheme, o runtime.Object) (runtime.Object, error) {
	kinds, _, err := scheme.ObjectKinds(o)
	if err != nil {
		return o, nil // it is untyped already
	}
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return nil, err
	}
	u := &unstructured.Unstructured{Object: m}
	u.SetGroupVersionKind(kinds[0])
	if !u.IsList() {
		return u, nil
	}
	return u.ToList()
}

// control is the deployment controller.
func (c *cluster) control(ctx context.Context) {
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		list, err := c.client.Resource(deployments).Namespace("cells").List(ctx, metav1.ListOptions{})
		if err != nil {
			continue
		}
		for i := range list.Items {
			c.step(ctx, &list.Items[i])
		}
	}
}

// step moves a deployment one step. What it has of old and new processes is in its status.
func (c *cluster) step(ctx context.Context, o *unstructured.Unstructured) {
	get := func(fields ...string) int64 { n, _, _ := unstructured.NestedInt64(o.Object, fields...); return n }
	want := get("spec", "replicas")
	template, _, _ := unstructured.NestedMap(o.Object, "spec", "template")
	text, _ := json.Marshal(template)
	running, _, _ := unstructured.NestedString(o.Object, "metadata", "annotations", "test/template")
	total, updated := get("status", "replicas"), get("status", "updatedReplicas")
	if running != string(text) {
		updated = 0
	}
	_, broken := c.broken.Load(imageOf(o))
	ready := total
	switch {
	case updated < want && total <= want:
		total, updated = total+1, updated+1
		ready = total
		if broken {
			ready--
		}
	case broken && updated > 0:
		ready = total - updated // it waits for what never comes
	case total > want || updated < want:
		total--
		updated = min(updated, total)
		ready = total
	}
	// The controller writes the status, and an annotation for its own memory.
	patch, _ := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{"test/template": string(text)}},
		"status":   map[string]any{"replicas": total, "updatedReplicas": updated, "readyReplicas": ready, "observedGeneration": o.GetGeneration()},
	})
	_, _ = c.client.Resource(deployments).Namespace("cells").Patch(ctx, o.GetName(), "application/merge-patch+json", patch, metav1.PatchOptions{FieldManager: "controller"})
}

func imageOf(o *unstructured.Unstructured) string {
	list, _, _ := unstructured.NestedSlice(o.Object, "spec", "template", "spec", "containers")
	if len(list) == 0 {
		return ""
	}
	image, _ := list[0].(map[string]any)["image"].(string)
	return image
}

func (c *cluster) open() *kube.Provisioner {
	return kube.New(kube.Config{Fleet: fleet, Client: c.client, ReadyWithin: 3 * time.Second, Poll: 2 * time.Millisecond})
}

func spec(cell cells.CellID) provision.Spec {
	return provision.Spec{Cell: cell, Version: "v1", Image: "registry.example/memory@sha256:0001", Command: []string{"/memory", "--listen", "{listen}", "--store", "{store}"},
		Replicas: 2, Generation: 1, Desired: provision.DesiredServing, Store: provision.StoreSpec{Engine: provision.EngineNone}}
}

func harness(t provisiontest.TB) provisiontest.Harness {
	c := newCluster(t)
	p := c.open()
	return provisiontest.Harness{Provisioner: p, Reopen: func() provision.Provisioner { return c.open() }, Spec: spec,
		Broken: func(s *provision.Spec) { s.Image = "registry.example/broken"; c.broken.Store(s.Image, true) },
		Left: func(cell cells.CellID) []string {
			out, err := p.Left(context.Background(), cell)
			if err != nil {
				t.Errorf("%v", err)
			}
			if o, err := c.client.Resource(deployments).Namespace("cells").Get(context.Background(), kube.Name(cell), metav1.GetOptions{}); err == nil {
				list, _, _ := unstructured.NestedSlice(o.Object, "spec", "template", "spec", "containers")
				n, _, _ := unstructured.NestedInt64(o.Object, "spec", "replicas")
				out = append(out, fmt.Sprintf("%d of %v", n, list))
			}
			return out
		}}
}

func TestSuite(t *testing.T)   { provisiontest.Run(t, harness) }
func TestMutants(t *testing.T) { provisiontest.Mutants(t, harness) }

// goldens are specs of each kind.
func goldens() map[string]provision.Spec {
	sqlite := spec("c1")
	sqlite.Replicas, sqlite.Store = 1, provision.StoreSpec{Engine: provision.EngineSQLite, Size: "20Gi"}
	sqlite.Command = append(sqlite.Command, "--dsn", "{dsn}")
	postgres := spec("c2")
	postgres.Store = provision.StoreSpec{Engine: provision.EnginePostgres, DSN: provision.SecretRef{Name: "c2-db", Key: "url"}}
	postgres.Env = map[string]string{"LEVEL": "debug", "WHERE": "{cell} {version}", "DSN": "{dsn}"}
	postgres.Secrets = map[string]provision.SecretRef{"TOKEN": {Name: "api", Key: "token"}}
	none := spec("c3")
	none.Command = nil
	return map[string]provision.Spec{"sqlite": sqlite, "postgres": postgres, "none": none}
}

// The manifests are what they were, and every one of them is what the API knows, to the
// last field.
func TestManifests(t *testing.T) {
	decoder := serializer.NewCodecFactory(newScheme(t), serializer.EnableStrict).UniversalDeserializer()
	for name, s := range goldens() {
		var b bytes.Buffer
		if err := kube.Render(&b, fleet, s); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		path := filepath.Join("testdata", name+".yaml")
		if *rewrite {
			if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(want, b.Bytes()) {
			t.Errorf("%s is not what is rendered, %v; look, then: go test ./directory/provision/kube -run Manifests -rewrite\n%s", path, err, b.Bytes())
		}
		list, err := kube.RenderFiles(fleet, s)
		if err != nil || len(list) != 6 {
			t.Fatalf("%s: %d files, %v", name, len(list), err)
		}
		for _, f := range list {
			if _, _, err := decoder.Decode(f.Data, nil, nil); err != nil {
				t.Errorf("%s: %v", f.Name, err)
			}
		}
		if strings.Contains(b.String(), "kind: Secret") {
			t.Errorf("%s: a secret is written", name)
		}
	}
}

func TestUnsupported(t *testing.T) {
	for name, spoil := range map[string]func(*provision.Spec){
		"no image":          func(s *provision.Spec) { s.Image = "" },
		"no engine":         func(s *provision.Spec) { s.Store.Engine = "" },
		"shared SQLite":     func(s *provision.Spec) { s.Store.Engine = provision.EngineSQLite },
		"no database":       func(s *provision.Spec) { s.Store.Engine = provision.EnginePostgres },
		"name with an end-": func(s *provision.Spec) { s.Cell = "c-" },
	} {
		s := spec("c1")
		spoil(&s)
		if _, err := kube.Objects(fleet, s); !errors.Is(err, provision.ErrUnsupported) || !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v, want ErrUnsupported", name, err)
		}
	}
}

// A field that somebody else owns is refused and named, and taken over when forced; what
// others set beside ours stays.
func TestConflicts(t *testing.T) {
	c := newCluster(t)
	s := spec("c1")
	if err := c.open().Provision(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	r := c.client.Resource(deployments).Namespace("cells")
	theirs := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "apps/v1", "kind": "Deployment",
		"metadata": map[string]any{"name": "cell-c1", "namespace": "cells", "annotations": map[string]any{"team": "x"}},
		"spec":     map[string]any{"replicas": int64(5)}}}
	if _, err := r.Apply(t.Context(), "cell-c1", theirs, metav1.ApplyOptions{FieldManager: "autoscaler", Force: true}); err != nil {
		t.Fatal(err)
	}
	s.Generation++
	err := c.open().Upgrade(t.Context(), s)
	if !errors.Is(err, provision.ErrConflict) || !strings.Contains(err.Error(), "spec.replicas") || !strings.Contains(err.Error(), "autoscaler") {
		t.Errorf("%v, want ErrConflict that names spec.replicas and its owner", err)
	}
	forced := kube.New(kube.Config{Fleet: fleet, Client: c.client, ReadyWithin: 3 * time.Second, Poll: 2 * time.Millisecond, Force: true})
	if err := forced.Upgrade(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	o, err := r.Get(t.Context(), "cell-c1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if n, _, _ := unstructured.NestedInt64(o.Object, "spec", "replicas"); n != 2 || o.GetAnnotations()["team"] != "x" {
		t.Errorf("%d replicas, annotations %v", n, o.GetAnnotations())
	}
}

// An object of the name that is not the cell's is left alone, and not deleted either.
func TestOthersObjects(t *testing.T) {
	c := newCluster(t)
	services := c.client.Resource(schema.GroupVersionResource{Version: "v1", Resource: "services"}).Namespace("cells")
	other := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"name": "cell-c1", "namespace": "cells"}}}
	if _, err := services.Create(t.Context(), other, metav1.CreateOptions{FieldManager: "somebody"}); err != nil {
		t.Fatal(err)
	}
	s := spec("c1")
	if err := c.open().Provision(t.Context(), s); !errors.Is(err, provision.ErrConflict) || !strings.Contains(err.Error(), "Service cells/cell-c1") {
		t.Errorf("%v, want ErrConflict that names the object", err)
	}
	s.Generation, s.Desired = 2, provision.DesiredRetired
	if err := c.open().Retire(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if _, err := services.Get(t.Context(), "cell-c1", metav1.GetOptions{}); err != nil {
		t.Errorf("somebody else's object: %v", err)
	}
}

// The cluster's probes are not enough where the directory can be asked.
func TestHeard(t *testing.T) {
	c := newCluster(t)
	var mu sync.Mutex
	var living []provision.Live
	p := kube.New(kube.Config{Fleet: fleet, Client: c.client, ReadyWithin: 200 * time.Millisecond, Poll: 2 * time.Millisecond,
		Living: func(context.Context, cells.CellID) ([]provision.Live, error) {
			mu.Lock()
			defer mu.Unlock()
			return living, nil
		}})
	s := spec("c1")
	if err := p.Provision(t.Context(), s); err == nil || !strings.Contains(err.Error(), "0 of 2 processes are ready") {
		t.Errorf("nobody is heard: %v", err)
	}
	mu.Lock()
	living = []provision.Live{{Version: "v1", Ready: true}, {Version: "v1", Ready: true}}
	mu.Unlock()
	if err := p.Provision(t.Context(), s); err != nil {
		t.Error(err)
	}
}
