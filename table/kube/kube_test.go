// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"
	"pgregory.net/rapid"

	"github.com/cloister-dev/cloister/cells"
)

func TestName(t *testing.T) {
	for id, want := range map[cells.TenantID]string{
		"acme": "acme", "acme-eu": "acme00eu", "Acme": "93cme", "org.7": "org017", "tenant-0042": "tenant00020242",
		"Z_9:@": "9s9t909192", ".": "01", "..": "0101",
	} {
		if got, err := Name(id); err != nil || got != want {
			t.Errorf("Name(%q) = %q, %v; want %q", id, got, err, want)
		}
	}
	if got, err := Name(cells.TenantID(strings.Repeat("x", 128))); err != nil || len(got) != 128 {
		t.Errorf("%q, %v", got, err)
	}
	for _, id := range []cells.TenantID{"", "a b", "ü", cells.TenantID(strings.Repeat("X", 127))} {
		if got, err := Name(id); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("Name(%q) = %q, %v; want ErrInvalid", id, got, err)
		}
	}
}

// Names differ when ids do, sort as ids do, and are names to Kubernetes.
func TestNameProperties(t *testing.T) {
	id := rapid.StringMatching(`[A-Za-z0-9._:@-]{1,120}`)
	rapid.Check(t, func(t *rapid.T) {
		a, b := id.Draw(t, "a"), id.Draw(t, "b")
		if rapid.Bool().Draw(t, "prefix") {
			b = a[:rapid.IntRange(1, len(a)).Draw(t, "n")] + b[:1]
		}
		na, err := Name(cells.TenantID(a))
		if err != nil {
			t.Fatal(err)
		}
		nb, err := Name(cells.TenantID(b))
		if err != nil {
			t.Fatal(err)
		}
		if cmp.Compare(a, b) != cmp.Compare(na, nb) {
			t.Fatalf("%q, %q became %q, %q", a, b, na, nb)
		}
		if wrong := validation.IsDNS1123Subdomain(na); len(wrong) > 0 {
			t.Fatalf("%q: %v", na, wrong)
		}
	})
}

func TestRevisionOf(t *testing.T) {
	for rv, want := range map[string]cells.Revision{"1": 1, "9223372036854775807": 1<<63 - 1} {
		if got, err := revisionOf(rv); err != nil || got != want {
			t.Errorf("%q: %d, %v", rv, got, err)
		}
	}
	for _, rv := range []string{"", "0", "01", "x", "1x", "-1", "+1", "9223372036854775808", "18446744073709551617"} {
		if got, err := revisionOf(rv); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %d, %v; want ErrInvalid", rv, got, err)
		}
	}
}

func object(edit func(obj map[string]any)) *unstructured.Unstructured {
	status, err := statusOf(cells.TenantRoute{TenantID: "t", State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}, 3)
	if err != nil {
		panic(err)
	}
	obj := map[string]any{
		"apiVersion": Group + "/" + Version, "kind": Kind, "metadata": map[string]any{"name": "t", "namespace": "n", "resourceVersion": "7"},
		"spec": map[string]any{"tenant": "t"}, "status": status,
	}
	edit(obj)
	return &unstructured.Unstructured{Object: obj}
}

func TestDecode(t *testing.T) {
	obj := object(func(map[string]any) {})
	r, ok, err := decode(obj)
	if before, has := follows(obj); err != nil || !ok || r.Revision != 7 || r.CellID != "a" || !has || before != 3 {
		t.Fatalf("%+v, %v, %v, follows %d", r, ok, err, before)
	}
	for name, edit := range map[string]func(obj map[string]any){
		"no status": func(obj map[string]any) { delete(obj, "status") },
		"no route":  func(obj map[string]any) { delete(obj["status"].(map[string]any), "route") },
	} {
		if r, ok, err := decode(object(edit)); ok || err != nil {
			t.Errorf("%s: %+v, %v, %v; want no row", name, r, ok, err)
		}
	}
	for name, edit := range map[string]func(obj map[string]any){
		"no format":      func(obj map[string]any) { delete(obj["status"].(map[string]any), "format") },
		"newer":          func(obj map[string]any) { obj["status"].(map[string]any)["format"] = int64(2) },
		"unknown field":  func(obj map[string]any) { obj["status"].(map[string]any)["route"].(map[string]any)["novel"] = "x" },
		"no row":         func(obj map[string]any) { obj["status"].(map[string]any)["route"] = "x" },
		"another name":   func(obj map[string]any) { obj["metadata"].(map[string]any)["name"] = "u" },
		"another tenant": func(obj map[string]any) { obj["spec"].(map[string]any)["tenant"] = "u" },
		"no order":       func(obj map[string]any) { obj["metadata"].(map[string]any)["resourceVersion"] = "abc" },
		"malformed state": func(obj map[string]any) {
			obj["status"].(map[string]any)["route"].(map[string]any)["state"] = "DORMANT"
		},
	} {
		if r, ok, err := decode(object(edit)); !ok || !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %+v, %v, %v; want ErrInvalid", name, r, ok, err)
		}
	}
}

func TestParseURL(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(config, []byte(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://one.example"}}, {name: d, cluster: {server: "https://two.example"}}]
contexts: [{name: c, context: {cluster: c, user: u, namespace: fleet}}, {name: d, context: {cluster: d, user: u}}]
current-context: c
users: [{name: u, user: {}}]
`), 0o600); err != nil {
		t.Fatal(err)
	}
	for raw, want := range map[string][2]string{
		"kube:?kubeconfig=" + config:                       {"https://one.example", "fleet"},
		"kube:other?kubeconfig=" + config:                  {"https://one.example", "other"},
		"kube:?context=d&kubeconfig=" + config:             {"https://two.example", "default"},
		"kube:cells-1?kubeconfig=" + config + "&context=d": {"https://two.example", "cells-1"},
	} {
		cfg, namespace, err := ParseURL(raw)
		if err != nil || cfg.Host != want[0] || namespace != want[1] {
			t.Errorf("%s: %+v, %q, %v", raw, cfg, namespace, err)
		}
	}
	for _, raw := range []string{"", "kube", "kubernetes:x", "kube:A_B?kubeconfig=" + config, "kube:x?novel=1", "kube:x?kubeconfig=" + config + ".none",
		"kube:x?context=none&kubeconfig=" + config, "kube:x?context=&kubeconfig=" + config, "kube:x?%zz"} {
		if cfg, ns, err := ParseURL(raw); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %+v, %q, %v; want ErrInvalid", raw, cfg, ns, err)
		}
	}
}
