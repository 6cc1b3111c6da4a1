// SPDX-License-Identifier: Apache-2.0

package storestest_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/storestest"
)

// bucket is a server's memory: objects by their full names. down makes every request
// fail.
type bucket struct {
	mu      sync.Mutex // guards all below
	objects map[string]string
	down    bool
}

// model is a store of objects with what a test may break.
type model struct {
	b  *bucket
	at stores.Location
	d  defect
	// cached is what a caching handle read first.
	cached atomic.Pointer[string]
}

// defect is what a model does wrong.
type defect struct {
	cacheNonce     bool // answers a read with what it read first
	sharedNonce    *atomic.Pointer[string]
	nonceAfterDel  bool // a delete of the nonce does nothing
	looseNonce     bool // passes on whatever is stored
	garbledIsNone  bool // takes what is no nonce for none
	ownFolderOnly  bool // looks for marks in its own folder only: a cell inside is missed
	anyMark        bool // sees every mark
	lastEstablish  bool // the last id wins
	raceEstablish  bool // answers with the caller's id without reading it back
	deleteAll      bool // the nonce's delete takes everything reserved along
	lettersInside  bool // takes a/bc for inside a/b
	reservedCounts bool // its own objects make it non-empty
	reservedHidden bool // objects named as reserved ones anywhere count as its own
	unchecked      bool // takes any argument
	downIsNone     bool // a server that is away holds nothing
}

func (m *model) key(name string) string { return m.at.Bucket + ":" + m.at.Key(name) }

func (m *model) do(ctx context.Context, fn func(objects map[string]string)) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, ctx.Err())
	}
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	if m.b.down {
		if m.d.downIsNone {
			fn(map[string]string{})
			return nil
		}
		return fmt.Errorf("%w: down", cells.ErrUnavailable)
	}
	fn(m.b.objects)
	return nil
}

func (m *model) check(v interface{ Validate() error }) error {
	if m.d.unchecked {
		return nil
	}
	return v.Validate()
}

func (m *model) Kind() stores.Kind         { return "model" }
func (m *model) Location() stores.Location { return m.at }

func (m *model) Identity(ctx context.Context) (id stores.Identity, err error) {
	id = stores.Identity{Kind: m.Kind(), Location: m.at}
	err = m.do(ctx, func(o map[string]string) { id.Deployment = stores.DeploymentID(o[m.key("_cell_deployment")]) })
	return id, err
}

func (m *model) Establish(ctx context.Context, id stores.DeploymentID) (got stores.DeploymentID, err error) {
	if err := m.check(id); err != nil {
		return "", err
	}
	err = m.do(ctx, func(o map[string]string) {
		if k := m.key("_cell_deployment"); o[k] == "" || m.d.lastEstablish {
			o[k] = string(id)
		}
		got = stores.DeploymentID(o[m.key("_cell_deployment")])
		if m.d.raceEstablish {
			got = id
		}
	})
	return got, err
}

func (m *model) WriteNonce(ctx context.Context, n stores.Nonce) error {
	if err := m.check(n); err != nil {
		return err
	}
	if m.d.sharedNonce != nil {
		m.d.sharedNonce.Store((*string)(&n))
	}
	return m.do(ctx, func(o map[string]string) { o[m.key("_cell_probe")] = string(n) })
}

func (m *model) ReadNonce(ctx context.Context) (stores.Nonce, error) {
	if p := m.cached.Load(); m.d.cacheNonce && p != nil {
		return stores.Nonce(*p), nil
	}
	var v string
	if err := m.do(ctx, func(o map[string]string) { v = o[m.key("_cell_probe")] }); err != nil {
		return "", err
	}
	if m.d.sharedNonce != nil && v == "" {
		if p := m.d.sharedNonce.Load(); p != nil {
			v = *p
		}
	}
	n := stores.Nonce(v)
	switch {
	case v == "", m.d.garbledIsNone && n.Validate() != nil:
		return "", stores.ErrNoNonce
	case n.Validate() != nil && !m.d.looseNonce:
		return "", n.Validate()
	}
	m.cached.Store(&v)
	return n, nil
}

func (m *model) DeleteNonce(ctx context.Context) error {
	return m.do(ctx, func(o map[string]string) {
		for k := range o {
			if k == m.key("_cell_probe") && !m.d.nonceAfterDel || m.d.deleteAll && strings.HasPrefix(k, m.key("_cell_")) {
				delete(o, k)
			}
		}
	})
}

func (m *model) Plant(ctx context.Context, k stores.Mark) error {
	if err := m.check(k); err != nil {
		return err
	}
	return m.do(ctx, func(o map[string]string) { o[m.key("_cell_isolation/"+string(k))] = "planted" })
}

func (m *model) Remove(ctx context.Context, k stores.Mark) error {
	if err := m.check(k); err != nil {
		return err
	}
	return m.do(ctx, func(o map[string]string) { delete(o, m.key("_cell_isolation/"+string(k))) })
}

// each calls fn with the names below the prefix.
func (m *model) each(ctx context.Context, fn func(name string)) error {
	return m.do(ctx, func(o map[string]string) {
		below := m.key("")
		if m.d.lettersInside {
			below = strings.TrimSuffix(below, "/")
		}
		for k := range o {
			if name, is := strings.CutPrefix(k, below); is {
				fn(name)
			}
		}
	})
}

func (m *model) Visible(ctx context.Context, k stores.Mark) (seen bool, err error) {
	if err := m.check(k); err != nil {
		return false, err
	}
	err = m.each(ctx, func(name string) {
		own := name == "_cell_isolation/"+string(k)
		seen = seen || own || m.d.anyMark || !m.d.ownFolderOnly && strings.HasSuffix(name, "/_cell_isolation/"+string(k))
	})
	return seen, err
}

func (m *model) Empty(ctx context.Context) (empty bool, holds string, err error) {
	err = m.each(ctx, func(name string) {
		reserved := strings.HasPrefix(name, "_cell_") || m.d.reservedHidden && strings.Contains(name, "_cell_")
		if !reserved || m.d.reservedCounts {
			holds = "object " + name
		}
	})
	return err == nil && holds == "", holds, err
}

var counter atomic.Int64

// harness runs the suite on models with a defect.
func harness(d defect) storestest.Harness {
	at := func(s stores.Store, prefix string) stores.Store {
		m := s.(*model)
		return &model{b: m.b, at: stores.Location{Bucket: m.at.Bucket, Prefix: prefix}, d: d}
	}
	return storestest.Harness{
		New: func(storestest.TB) stores.Store {
			return &model{b: &bucket{objects: map[string]string{}}, at: stores.Location{Bucket: fmt.Sprintf("b-%d", counter.Add(1)), Prefix: "a/b"}, d: d}
		},
		Another: func(_ storestest.TB, s stores.Store) stores.Store { return at(s, s.Location().Prefix) },
		Fill: func(tb storestest.TB, s stores.Store, tenant string) {
			_ = s.(*model).do(context.Background(), func(o map[string]string) { o[s.(*model).key("docs/"+tenant)] = "x" })
		},
		Garble: func(tb storestest.TB, s stores.Store, text string) {
			_ = s.(*model).do(context.Background(), func(o map[string]string) { o[s.(*model).key("_cell_probe")] = text })
		},
		Down: func(storestest.TB) stores.Store {
			return &model{b: &bucket{down: true}, at: stores.Location{Bucket: "down"}, d: d}
		},
		Inside: func(_ storestest.TB, s stores.Store) stores.Store { return at(s, s.Location().Prefix+"/c") },
		Beside: func(_ storestest.TB, s stores.Store) stores.Store { return at(s, s.Location().Prefix+"c") },
	}
}

func TestModel(t *testing.T) { storestest.Run(t, harness(defect{})) }

// Each defect is found by the cases that are there for it.
func TestMutants(t *testing.T) {
	for name, c := range map[string]struct {
		d    defect
		find []string
	}{
		"a read is answered from memory":         {defect{cacheNonce: true}, []string{"Nonce"}},
		"another store's nonce":                  {defect{sharedNonce: new(atomic.Pointer[string])}, []string{"NonceOfAnother"}},
		"a nonce that stays":                     {defect{nonceAfterDel: true}, []string{"Nonce"}},
		"what is no nonce is passed on":          {defect{looseNonce: true}, []string{"Garbled"}},
		"what is no nonce counts as none":        {defect{garbledIsNone: true}, []string{"Garbled"}},
		"a cell inside is missed":                {defect{ownFolderOnly: true}, []string{"Nested"}},
		"every mark is seen":                     {defect{anyMark: true}, []string{"Marks"}},
		"the last id wins":                       {defect{lastEstablish: true}, []string{"Establish"}},
		"the caller's id is not read back":       {defect{raceEstablish: true}, []string{"Establish", "EstablishAtOnce"}},
		"a delete takes more along":              {defect{deleteAll: true}, []string{"NamesApart"}},
		"letters in common count as inside":      {defect{lettersInside: true}, []string{"Nested", "Beside"}},
		"its own objects count":                  {defect{reservedCounts: true}, []string{"Empty", "Isolated"}},
		"another cell's reserved objects do not": {defect{reservedHidden: true}, []string{"Nested"}},
		"arguments are not checked":              {defect{unchecked: true}, []string{"Malformed"}},
		"away counts as empty":                   {defect{downIsNone: true}, []string{"Down"}},
	} {
		t.Run(name, func(t *testing.T) {
			found := map[string]bool{}
			h := harness(c.d)
			for _, cs := range storestest.Cases(h) {
				if failures := record(t.Context(), cs, h); len(failures) > 0 {
					found[cs.Name] = true
				}
			}
			missed := slices.DeleteFunc(slices.Clone(c.find), func(n string) bool { return found[n] })
			if len(missed) == len(c.find) {
				t.Errorf("not found by %v (found by %v)", c.find, found)
			}
		})
	}
}

// recorder is a TB that remembers failures instead of failing a test.
type recorder struct {
	ctx context.Context

	mu       sync.Mutex // guards all below
	failures []string
	cleanups []func()
}

func (r *recorder) Helper()                  {}
func (r *recorder) Context() context.Context { return r.ctx }

func (r *recorder) Cleanup(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cleanups = append(r.cleanups, f)
}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

// record runs one case and returns its failures.
func record(ctx context.Context, c storestest.Case, h storestest.Harness) []string {
	r := &recorder{ctx: ctx}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.Run(r, h)
	}()
	<-done
	for _, f := range r.cleanups {
		f()
	}
	return r.failures
}
