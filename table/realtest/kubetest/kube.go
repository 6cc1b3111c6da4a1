// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"
	"go.etcd.io/etcd/server/v3/embed"
	servertesting "k8s.io/apiextensions-apiserver/pkg/cmd/server/testing"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"github.com/cloister-dev/cloister/table/realtest/etcdtest"
)

// Server is an API server in this process.
type Server struct {
	// Config reaches it with every right.
	Config *rest.Config
	// Etcd is its store.
	Etcd *etcdtest.Server

	api servertesting.TestServer
}

// unused is what the options of authentication and authorization want to read; with
// the loopback's own credential nothing is asked of it.
const unused = `apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
current-context: none
users: [{name: none, user: {}}]
`

// logger keeps the server's words to itself; what goes wrong is returned.
type logger struct{}

func (logger) Errorf(string, ...any) {}
func (logger) Fatalf(string, ...any) {}
func (logger) Logf(string, ...any)   {}

// Start starts an API server with its data in dir. Flags are those of
// apiextensions-apiserver.
func Start(dir string, flags ...string) (*Server, error) {
	klog.SetLogger(logr.Discard())
	// Without progress notifications of its store the server has no bookmarks to give
	// while nothing changes; a cluster's etcd is set so, too.
	store, err := etcdtest.Start(dir, func(cfg *embed.Config) { cfg.WatchProgressNotifyInterval = 200 * time.Millisecond })
	if err != nil {
		return nil, err
	}
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(unused), 0o600); err != nil {
		store.Close()
		return nil, err
	}
	api, err := servertesting.StartTestServer(logger{}, nil, append([]string{
		"--etcd-prefix", "test", "--etcd-servers", store.URL,
		"--authentication-skip-lookup", "--authentication-kubeconfig", kubeconfig, "--authorization-kubeconfig", kubeconfig,
		"--kubeconfig", kubeconfig, "--enable-priority-and-fairness=false",
		"--disable-admission-plugins", "NamespaceLifecycle,MutatingAdmissionWebhook,ValidatingAdmissionWebhook,ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
	}, flags...), nil)
	if err != nil {
		store.Close()
		return nil, err
	}
	return &Server{Config: api.ClientConfig, Etcd: store, api: api}, nil
}

// Close stops the server and its store.
func (s *Server) Close() {
	s.api.TearDownFn()
	s.Etcd.Close()
}

// Install creates or replaces a custom resource definition, in YAML, and waits
// until it is served.
func (s *Server) Install(ctx context.Context, crd []byte) error {
	var obj unstructured.Unstructured
	if err := yaml.Unmarshal(crd, &obj.Object); err != nil {
		return err
	}
	client, err := dynamic.NewForConfig(s.Config)
	if err != nil {
		return err
	}
	crds := client.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	_, err = crds.Create(ctx, &obj, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict})
	if apierrors.IsAlreadyExists(err) {
		var have *unstructured.Unstructured
		if have, err = crds.Get(ctx, obj.GetName(), metav1.GetOptions{}); err == nil {
			obj.SetResourceVersion(have.GetResourceVersion())
			_, err = crds.Update(ctx, &obj, metav1.UpdateOptions{FieldValidation: metav1.FieldValidationStrict})
		}
	}
	if err != nil {
		return err
	}
	group, _, _ := unstructured.NestedString(obj.Object, "spec", "group")
	plural, _, _ := unstructured.NestedString(obj.Object, "spec", "names", "plural")
	versions, _, _ := unstructured.NestedSlice(obj.Object, "spec", "versions")
	version, _, _ := unstructured.NestedString(versions[0].(map[string]any), "name")
	served := client.Resource(schema.GroupVersionResource{Group: group, Version: version, Resource: plural})
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); ; {
		if _, err = served.List(ctx, metav1.ListOptions{Limit: 1}); err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s is not served: %w", obj.GetName(), err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
