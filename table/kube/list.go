// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/cloister-dev/cloister/cells"
)

const (
	chunk     = 500 // objects of one request
	maxWalks  = 64
	walkLife  = time.Minute
	listTries = 3
)

// walkKey says where a page begins.
type walkKey struct {
	after cells.TenantID
	cell  cells.CellID
}

// walk is a list that is under way: where it is and what it has read ahead. It is a
// view of one revision.
type walk struct {
	rest     []cells.TenantRoute // read, not handed out
	token    string              // of the next request; "" at the end
	revision cells.Revision
	begun    bool
	used     time.Time
}

// keep remembers a walk for the page after tenant. A walk that is newer stays: a
// list that began later must not go on with an older view.
func (t *Table) keep(key walkKey, w *walk) {
	w.used = time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	var oldest walkKey
	for k, v := range t.walks {
		if time.Since(v.used) > walkLife {
			delete(t.walks, k)
		} else if o := t.walks[oldest]; o == nil || v.used.Before(o.used) {
			oldest = k
		}
	}
	if have := t.walks[key]; have != nil && have.revision > w.revision {
		return
	}
	if len(t.walks) >= maxWalks {
		delete(t.walks, oldest)
	}
	t.walks[key] = w
}

// take returns the walk that was kept for key, once; nil if there is none.
func (t *Table) take(key walkKey) *walk {
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.walks[key]
	delete(t.walks, key)
	if w == nil || time.Since(w.used) > walkLife {
		return nil
	}
	return w
}

// List implements [cells.RoutingTable]. A page that goes on from another is of the
// same revision as that, or of a newer one.
func (t *Table) List(ctx context.Context, opts cells.ListOptions) (cells.RoutePage, error) {
	if err := t.begin(ctx); err != nil {
		return cells.RoutePage{}, err
	}
	if err := opts.Validate(); err != nil {
		return cells.RoutePage{}, err
	}
	var w *walk
	if opts.After != "" {
		w = t.take(walkKey{opts.After, opts.Cell})
	}
	for try := 1; ; try++ {
		if w == nil {
			w = &walk{}
		}
		page, err := t.list(ctx, w, opts)
		if !errors.Is(err, cells.ErrCompacted) {
			return page, err
		}
		if try == listTries {
			return cells.RoutePage{}, fmt.Errorf("%w: the list expires faster than it is read: %v", cells.ErrUnavailable, err)
		}
		w = nil // the token has expired: from the start
	}
}

func (t *Table) list(ctx context.Context, w *walk, opts cells.ListOptions) (cells.RoutePage, error) {
	limit := opts.PageSize()
	var page cells.RoutePage
	for {
		for i, r := range w.rest {
			if r.TenantID <= opts.After || !opts.Matches(&r) {
				continue
			}
			if len(page.Routes) == limit {
				w.rest = w.rest[i:]
				page.Next, page.Revision = page.Routes[limit-1].TenantID, w.revision
				t.keep(walkKey{page.Next, opts.Cell}, w)
				return page, nil
			}
			page.Routes = append(page.Routes, r.Clone())
		}
		w.rest = nil
		if w.begun && w.token == "" {
			page.Revision = w.revision
			return page, nil
		}
		rows, err := t.more(ctx, w)
		if err != nil {
			return cells.RoutePage{}, err
		}
		w.rest = rows
	}
}

// more reads the next chunk of a walk.
func (t *Table) more(ctx context.Context, w *walk) ([]cells.TenantRoute, error) {
	var rows []cells.TenantRoute
	err := t.objects(ctx, w, func(obj *unstructured.Unstructured) error {
		r, ok, err := decode(obj)
		if err == nil && ok {
			rows = append(rows, r)
		}
		return err
	})
	return rows, err
}

// objects reads the next chunk of objects of a walk.
func (t *Table) objects(ctx context.Context, w *walk, each func(*unstructured.Unstructured) error) error {
	c, done := t.call(ctx)
	defer done()
	list, err := t.client.List(c, metav1.ListOptions{Limit: chunk, Continue: w.token})
	if err != nil {
		return t.failed(ctx, "listing routes", err)
	}
	revision, err := revisionOf(list.GetResourceVersion())
	if err != nil {
		return err
	}
	for i := range list.Items {
		if err := each(&list.Items[i]); err != nil {
			return err
		}
	}
	if !w.begun {
		w.revision, w.begun = revision, true
	}
	w.token = list.GetContinue()
	return nil
}

// all walks over every object and returns the revision of the view. It begins again
// if its token expires, and says so by calling restart.
func (t *Table) all(ctx context.Context, restart func(), each func(*unstructured.Unstructured) error) (cells.Revision, error) {
	for try := 1; ; try++ {
		restart()
		w := &walk{}
		var err error
		for err == nil && (!w.begun || w.token != "") {
			err = t.objects(ctx, w, each)
		}
		if !errors.Is(err, cells.ErrCompacted) || try == listTries {
			return w.revision, err
		}
	}
}

// current returns the resource's revision by a consistent read.
func (t *Table) current(ctx context.Context) (cells.Revision, error) {
	c, done := t.call(ctx)
	defer done()
	list, err := t.client.List(c, metav1.ListOptions{Limit: 1})
	if err != nil {
		if apierrors.IsNotFound(err) {
			err = fmt.Errorf("the server does not know %s: is the CRD installed (cell table crd)? %w", GVR.GroupResource(), err)
		}
		return 0, t.failed(ctx, "reading the revision", err)
	}
	return revisionOf(list.GetResourceVersion())
}

// Wish is an object whose spec.cell is not where its tenant is.
type Wish struct {
	Tenant cells.TenantID `json:"tenant"`
	// Cell is where the tenant is wished to be.
	Cell cells.CellID `json:"wish"`
	// Route is the tenant's row; its State is 0 if it has none.
	Route cells.TenantRoute `json:"route,omitzero"`
}

// Wishes returns, in the order of tenants, the wishes of people that are not
// fulfilled: the tenant is not placed, is in another cell, or is on its way.
// Tombstones have none.
func (t *Table) Wishes(ctx context.Context) ([]Wish, error) {
	if err := t.begin(ctx); err != nil {
		return nil, err
	}
	var out []Wish
	_, err := t.all(ctx, func() { out = nil }, func(obj *unstructured.Unstructured) error {
		r, _, err := decode(obj)
		if err != nil {
			return err
		}
		cell, _, _ := unstructured.NestedString(obj.Object, "spec", "cell")
		tenant, _, _ := unstructured.NestedString(obj.Object, "spec", "tenant")
		if cell == "" || r.State == cells.StateDeleted || r.State == cells.StateDeleting || r.Serving() && r.CellID == cells.CellID(cell) {
			return nil
		}
		out = append(out, Wish{Tenant: cells.TenantID(tenant), Cell: cells.CellID(cell), Route: r})
		return nil
	})
	return out, err
}
