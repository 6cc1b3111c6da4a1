// SPDX-License-Identifier: Apache-2.0

package kubetest_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/kube"
)

// bare is what kubectl would use.
func bare(t testing.TB, ns string) dynamic.ResourceInterface {
	t.Helper()
	c, err := dynamic.NewForConfig(server.Config)
	if err != nil {
		t.Fatal(err)
	}
	return c.Resource(kube.GVR).Namespace(ns)
}

func wish(name, tenant, cell string) *unstructured.Unstructured {
	spec := map[string]any{"tenant": tenant}
	if cell != "" {
		spec["cell"] = cell
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": kube.Group + "/" + kube.Version, "kind": kube.Kind, "metadata": map[string]any{"name": name}, "spec": spec,
	}}
}

// The schema refuses on the server, for kubectl too, what the protocol forbids.
func TestSchemaRules(t *testing.T) {
	ns := namespace()
	table, raw := open(t, ns), bare(t, ns)
	patch := func(name, body string, sub ...string) error {
		_, err := raw.Patch(t.Context(), name, types.MergePatchType, []byte(body), metav1.PatchOptions{}, sub...)
		return err
	}
	moving := func(r *cells.TenantRoute) { r.MoveID, r.SourceCell, r.TargetCell, r.Base = "m", "a", "b", 5 }
	five := row("five")
	five.Epoch, five.Floor = 5, 5
	committing := five
	committing.TenantID, committing.State, committing.CellID, committing.Epoch, committing.Floor = "committing", cells.StateCommitting, "b", 7, 7
	moving(&committing)
	copying := five
	copying.TenantID, copying.State, copying.Epoch, copying.Floor = "copying", cells.StateCopying, 6, 6
	moving(&copying)
	deleting, deleted := five, five
	deleting.TenantID, deleting.State = "deleting", cells.StateDeleting
	deleted.TenantID, deleted.State = "deleted", cells.StateDeleted
	for _, r := range []cells.TenantRoute{five, committing, copying, deleting, deleted} {
		cas(t, table, 0, r)
	}
	for _, c := range []struct{ name, body, says string }{
		{"five", `{"status":{"route":{"epoch":4,"floor":4}}}`, "epoch never decreases"},
		{"five", `{"status":{"route":{"floor":4}}}`, "floor never decreases"},
		{"five", `{"status":{"route":{"floor":6}}}`, "above the epoch"},
		{"five", `{"status":{"route":{"cell":"b"}}}`, "one cell only"},
		{"five", `{"status":{"route":{"cell":"b","epoch":7,"floor":5}}}`, "admitted at another cell"},
		{"five", `{"status":{"route":{"tenant":"other"}}}`, "another tenant's"},
		{"five", `{"status":{"route":null}}`, "never taken away"},
		{"five", `{"status":null}`, "never taken away"},
		{"five", `{"status":{"route":{"state":"DORMANT"}}}`, "Unsupported value"},
		{"five", `{"status":{"route":{"epoch":"6"}}}`, "must be of type integer"},
		{"committing", `{"status":{"route":{"state":"COPYING"}}}`, "only goes forward"},
		{"committing", `{"status":{"route":{"epoch":8,"floor":8}}}`, "only goes forward"},
		{"copying", `{"status":{"route":{"state":"ACTIVE"}}}`, "not used again"},
		{"deleting", `{"status":{"route":{"state":"ACTIVE"}}}`, "not used again"},
		{"deleted", `{"status":{"route":{"state":"ACTIVE"}}}`, "not used again"},
	} {
		err := patch(c.name, c.body, "status")
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s %s: %v; want %q", c.name, c.body, err, c.says)
		}
	}
	if err := patch("five", `{"spec":{"tenant":"other"}}`); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "stays with its tenant") {
		t.Errorf("another tenant in the spec: %v", err)
	}
	for _, cell := range []string{"A", "a_b", strings.Repeat("c", 33)} {
		if err := patch("five", `{"spec":{"cell":"`+cell+`"}}`); !apierrors.IsInvalid(err) {
			t.Errorf("a wish for %q: %v", cell, err)
		}
	}
	// The spec's side cannot write a status at all.
	if err := patch("five", `{"status":{"route":{"epoch":4,"floor":4}}}`); err != nil {
		t.Fatal(err)
	}
	for _, want := range []cells.TenantRoute{five, committing, copying, deleting, deleted} {
		got, err := table.Get(t.Context(), want.TenantID)
		if err != nil || got.Epoch != want.Epoch || got.CellID != want.CellID || got.State != want.State {
			t.Errorf("after the refused changes: %+v, %v", got, err)
		}
	}
}

// People and GitOps own the spec, the table owns the status and the finalizer.
func TestGitOps(t *testing.T) {
	ns := namespace()
	table, raw := open(t, ns), bare(t, ns)
	ctx := t.Context()
	name, err := kube.Name("acme-eu")
	if err != nil {
		t.Fatal(err)
	}
	apply := func(cell string) *unstructured.Unstructured {
		t.Helper()
		obj, err := raw.Apply(ctx, name, wish(name, "acme-eu", cell), metav1.ApplyOptions{FieldManager: "gitops"})
		if err != nil {
			t.Fatal(err)
		}
		return obj
	}
	wishes := func() string {
		t.Helper()
		got, err := table.Wishes(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var s []string
		for _, w := range got {
			s = append(s, string(w.Tenant)+": "+string(w.Route.CellID)+" to "+string(w.Cell))
		}
		return strings.Join(s, ", ")
	}
	// A wish is no row.
	apply("a")
	if _, err := table.Get(ctx, "acme-eu"); !errors.Is(err, cells.ErrNotFound) {
		t.Fatalf("a wish alone: %v, want ErrNotFound", err)
	}
	if page, err := table.List(ctx, cells.ListOptions{}); err != nil || len(page.Routes) != 0 {
		t.Fatalf("a wish alone is listed: %+v, %v", page, err)
	}
	if got := wishes(); got != "acme-eu:  to a" {
		t.Errorf("wishes: %s", got)
	}
	r := cas(t, table, 0, row("acme-eu"))
	if got := wishes(); got != "" {
		t.Errorf("a fulfilled wish is left: %s", got)
	}
	// Applying again is no conflict, touches no status, and keeps the finalizer.
	w := watch(t, table, r.Revision)
	obj := apply("b")
	if f := obj.GetFinalizers(); len(f) != 1 || f[0] != kube.Finalizer {
		t.Errorf("finalizers %v", f)
	}
	now, err := table.Get(ctx, "acme-eu")
	if err != nil || now.CellID != "a" || now.Revision <= r.Revision {
		t.Errorf("after an edit of the spec: %+v, %v; want a newer revision of the same row", now, err)
	}
	if got := wishes(); got != "acme-eu: a to b" {
		t.Errorf("wishes: %s", got)
	}
	for seen := false; !seen; {
		up, err := w.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range up.Routes {
			seen = row.Revision == now.Revision
		}
	}
	if _, err := table.CompareAndSet(ctx, r.Revision, r); !errors.Is(err, cells.ErrConflict) {
		t.Errorf("a change from before the edit: %v, want ErrConflict", err)
	}
	owners := map[string]string{}
	for _, f := range obj.GetManagedFields() {
		var fields map[string]any
		if err := json.Unmarshal(f.FieldsV1.Raw, &fields); err != nil {
			t.Fatal(err)
		}
		for top := range fields {
			owners[top] += f.Manager + "/" + f.Subresource + " "
		}
	}
	if owners["f:spec"] != "gitops/ " || owners["f:status"] != "cloister/status " || owners["f:metadata"] != "cloister/ " {
		t.Errorf("owners %v", owners)
	}
	// Pruned: it stays while its epoch must be known.
	if err := raw.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	pruned, err := table.Get(ctx, "acme-eu")
	if err != nil || pruned.Epoch != r.Epoch {
		t.Fatalf("after it was pruned: %+v, %v", pruned, err)
	}
	r = cas(t, table, pruned.Revision, stamped(pruned, "still here"))
	// Taken away by force: whoever watches is told to list again.
	w = watch(t, table, r.Revision)
	if _, err := raw.Patch(ctx, name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := failure(t, w); !errors.Is(err, cells.ErrCompacted) {
		t.Errorf("a row removed by force: %v, want ErrCompacted", err)
	}
}

// Moves run by the controller pass the schema's rules, and a router follows them.
func TestMove(t *testing.T) {
	table := open(t, namespace())
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	router := cells.NewRouter(table)
	if err := router.Start(ctx); err != nil {
		t.Fatal(err)
	}
	defer router.Close()
	ctrl := cells.NewMoveController(table)
	if err := ctrl.Assign(ctx, "acme", "a", "test"); err != nil {
		t.Fatal(err)
	}
	for _, to := range []cells.CellID{"b", "c"} {
		if err := ctrl.Move(ctx, cells.MovePlan{TenantID: "acme", ToCell: to, Actor: "test"}); err != nil {
			t.Fatal(err)
		}
	}
	if err := ctrl.Delete(ctx, "acme", "test"); err != nil {
		t.Fatal(err)
	}
	if err := ctrl.Assign(ctx, "acme", "a", "test"); err != nil {
		t.Fatal(err)
	}
	r, err := table.Get(ctx, "acme")
	if err != nil || r.CellID != "a" || r.Epoch != 7 {
		t.Fatalf("%+v, %v; want epoch 7 at a", r, err)
	}
	for router.Lookup("acme").Revision < r.Revision {
		if _, err := router.Wait(ctx, "acme", router.Lookup("acme").Revision); err != nil {
			t.Fatal(err)
		}
	}
	if got := router.Lookup("acme"); got.Cell != "a" || got.Epoch != 7 {
		t.Errorf("the router has %+v", got)
	}
}
