// SPDX-License-Identifier: Apache-2.0

package storestest

import (
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
)

// establish: the first id stays, for every process.
func establish(tb TB, h Harness) {
	ctx := within(tb, h)
	s := h.New(tb)
	other := h.Another(tb, s)
	wantIdentity(ctx, tb, "new", s, "")
	first, second := stores.NewDeploymentID(), stores.NewDeploymentID()
	for i, st := range []stores.Store{s, other, s, h.Another(tb, s)} {
		id := second
		if i == 0 {
			id = first
		}
		got, err := st.Establish(ctx, id)
		if err != nil || got != first {
			tb.Fatalf("establish %d: %s, %v; want %s", i, got, err, first)
		}
		wantIdentity(ctx, tb, "after establish", other, first)
		wantIdentity(ctx, tb, "after establish", s, first)
	}
	wantIdentity(ctx, tb, "another store", h.New(tb), "")
}

// establishAtOnce: processes that start at once never go on with different ids.
func establishAtOnce(tb TB, h Harness) {
	ctx := within(tb, h)
	s := h.New(tb)
	const n = 6
	var wg sync.WaitGroup
	ids, errs := make([]stores.DeploymentID, n), make([]error, n)
	for i := range n {
		st := h.Another(tb, s)
		wg.Go(func() { ids[i], errs[i] = st.Establish(ctx, stores.NewDeploymentID()) })
	}
	wg.Wait()
	var agreed stores.DeploymentID
	for i := range n {
		switch {
		case errs[i] != nil && !(h.Undecided && errors.Is(errs[i], stores.ErrMismatch)):
			tb.Errorf("establish: %v", errs[i])
		case errs[i] != nil:
		case agreed == "":
			agreed = ids[i]
		case ids[i] != agreed:
			tb.Errorf("two processes go on with %s and %s", agreed, ids[i])
		}
	}
	got, err := s.Identity(ctx)
	switch {
	case h.Undecided && errors.Is(err, stores.ErrMismatch):
	case err != nil || got.Deployment == "" || agreed != "" && got.Deployment != agreed:
		tb.Errorf("afterwards %s, %v; want %s", got.Deployment, err, agreed)
	}
	// All of one deployment: the same id, from everybody, is one id.
	s, id := h.New(tb), stores.NewDeploymentID()
	for range n {
		st := h.Another(tb, s)
		wg.Go(func() {
			if got, err := st.Establish(ctx, id); err != nil || got != id {
				tb.Errorf("establish the same: %s, %v; want %s", got, err, id)
			}
		})
	}
	wg.Wait()
}

// nonce: what is read is what the store holds now, whoever wrote it.
func nonce(tb TB, h Harness) {
	ctx := within(tb, h)
	s := h.New(tb)
	other := h.Another(tb, s)
	wantNonce(ctx, tb, "new", s, "")
	wantNonce(ctx, tb, "new, another process", other, "")
	ok(tb, "delete none", s.DeleteNonce(ctx))
	for range 3 {
		for _, by := range []stores.Store{s, other} {
			n := stores.NewNonce()
			ok(tb, "write", by.WriteNonce(ctx, n))
			wantNonce(ctx, tb, "after a write", s, n)
			wantNonce(ctx, tb, "after a write, another process", other, n)
			ok(tb, "write again", by.WriteNonce(ctx, n))
			wantNonce(ctx, tb, "after the same write", other, n)
		}
		ok(tb, "delete", other.DeleteNonce(ctx))
		wantNonce(ctx, tb, "after a delete", s, "")
		wantNonce(ctx, tb, "after a delete, another process", other, "")
		ok(tb, "delete again", s.DeleteNonce(ctx))
	}
}

// nonceOfAnother: two stores never answer with each other's nonce.
func nonceOfAnother(tb TB, h Harness) {
	ctx := within(tb, h)
	a, b := h.New(tb), h.New(tb)
	na, nb := stores.NewNonce(), stores.NewNonce()
	ok(tb, "write", a.WriteNonce(ctx, na))
	wantNonce(ctx, tb, "another store", b, "")
	ok(tb, "write", b.WriteNonce(ctx, nb))
	wantNonce(ctx, tb, "first store", a, na)
	wantNonce(ctx, tb, "second store", b, nb)
	ok(tb, "delete", b.DeleteNonce(ctx))
	wantNonce(ctx, tb, "first store after the second's delete", a, na)
	wantNonce(ctx, tb, "second store after its delete", b, "")
}

// malformed: arguments that are no ids, nonces or marks change nothing.
func malformed(tb TB, h Harness) {
	ctx := within(tb, h)
	s := h.New(tb)
	n := stores.NewNonce()
	ok(tb, "write", s.WriteNonce(ctx, n))
	for _, bad := range []string{"", "x", strings.Repeat("A", 32), strings.Repeat("g", 64), strings.Repeat("'", 32), strings.Repeat("a", 31) + "\n",
		strings.Repeat("0", 33), strings.Repeat("0", 65), "../" + strings.Repeat("a", 29)} {
		_, e1 := s.Establish(ctx, stores.DeploymentID(bad))
		_, e2 := s.Visible(ctx, stores.Mark(bad))
		for i, err := range []error{e1, e2, s.WriteNonce(ctx, stores.Nonce(bad)), s.Plant(ctx, stores.Mark(bad)), s.Remove(ctx, stores.Mark(bad))} {
			if !errors.Is(err, cells.ErrInvalid) {
				tb.Errorf("%q, argument of method %d: %v, want ErrInvalid", bad, i, err)
			}
		}
	}
	wantNonce(ctx, tb, "afterwards", s, n)
	wantIdentity(ctx, tb, "afterwards", s, "")
}

// garbled: what somebody else put under the reserved name is not a nonce, and is
// neither repeated in an error nor taken for none.
func garbled(tb TB, h Harness) {
	ctx := within(tb, h)
	s := h.New(tb)
	for _, text := range []string{"hunter2", strings.Repeat("F", 64), strings.Repeat("a", 65), strings.Repeat("z", 200)} {
		ok(tb, "write", s.WriteNonce(ctx, stores.NewNonce()))
		h.Garble(tb, s, text)
		n, err := s.ReadNonce(ctx)
		if !errors.Is(err, cells.ErrInvalid) || n != "" || strings.Contains(err.Error(), text) {
			tb.Errorf("garbled with %d bytes: %.8s, %v; want ErrInvalid without the text", len(text), n, err)
		}
	}
	n := stores.NewNonce()
	ok(tb, "write over it", s.WriteNonce(ctx, n))
	wantNonce(ctx, tb, "written over", s, n)
}

// namesApart: id, nonce and marks do not touch each other.
func namesApart(tb TB, h Harness) {
	ctx := within(tb, h)
	s := h.New(tb)
	id, n, m, m2 := stores.NewDeploymentID(), stores.NewNonce(), stores.NewMark(), stores.NewMark()
	_, err := s.Establish(ctx, id)
	ok(tb, "establish", err)
	ok(tb, "write", s.WriteNonce(ctx, n))
	ok(tb, "plant", s.Plant(ctx, m))
	ok(tb, "plant", s.Plant(ctx, m2))
	check := func(what string, n stores.Nonce, one, two bool) {
		wantIdentity(ctx, tb, what, s, id)
		wantNonce(ctx, tb, what, s, n)
		wantMark(ctx, tb, what, s, m, one)
		wantMark(ctx, tb, what, s, m2, two)
	}
	check("all", n, true, true)
	ok(tb, "remove", s.Remove(ctx, m))
	check("one mark removed", n, false, true)
	ok(tb, "delete", s.DeleteNonce(ctx))
	check("nonce deleted", "", false, true)
	ok(tb, "remove", s.Remove(ctx, m2))
	check("both removed", "", false, false)
}

// marks: every process of the cell sees them, and nobody once they are removed.
func marks(tb TB, h Harness) {
	ctx := within(tb, h)
	s := h.New(tb)
	other := h.Another(tb, s)
	m := stores.NewMark()
	wantMark(ctx, tb, "before", s, m, false)
	ok(tb, "remove none", s.Remove(ctx, m))
	ok(tb, "plant", s.Plant(ctx, m))
	ok(tb, "plant again", s.Plant(ctx, m))
	wantMark(ctx, tb, "planted", s, m, true)
	wantMark(ctx, tb, "planted, another process", other, m, true)
	wantMark(ctx, tb, "a mark that was not planted", s, stores.NewMark(), false)
	ok(tb, "remove", other.Remove(ctx, m))
	wantMark(ctx, tb, "removed", s, m, false)
	wantMark(ctx, tb, "removed, another process", other, m, false)
}

// isolated: two cells' stores do not see each other's marks, and one store that two
// cells use is found.
func isolated(tb TB, h Harness) {
	ctx := within(tb, h)
	a, b := h.New(tb), h.New(tb)
	sa, sb, again := set(tb, a), set(tb, b), set(tb, h.Another(tb, a))
	ok(tb, "two stores", stores.Isolated(ctx, sa, sb))
	for _, twice := range []*stores.Set{sa, again} {
		if err := stores.Isolated(ctx, sa, twice); !errors.Is(err, stores.ErrShared) {
			tb.Errorf("one store: %v, want ErrShared", err)
		}
	}
	wantEmpty(ctx, tb, "afterwards", a, true)
}

func set(tb TB, s stores.Store) *stores.Set {
	out, err := stores.NewSet(s)
	ok(tb, "a set of one", err)
	return out
}

// empty: only what is a tenant's counts.
func empty(tb TB, h Harness) {
	ctx := within(tb, h)
	s := h.New(tb)
	wantEmpty(ctx, tb, "new", s, true)
	_, err := s.Establish(ctx, stores.NewDeploymentID())
	ok(tb, "establish", err)
	ok(tb, "write", s.WriteNonce(ctx, stores.NewNonce()))
	m := stores.NewMark()
	ok(tb, "plant", s.Plant(ctx, m))
	wantEmpty(ctx, tb, "with an id, a nonce and a mark", s, true)
	if h.Column {
		for _, none := range stores.NonTenants {
			h.Fill(tb, s, none)
		}
		wantEmpty(ctx, tb, "with rows of nobody", s, true)
	}
	h.Fill(tb, s, "acme")
	wantEmpty(ctx, tb, "with something of a tenant", s, false)
	wantEmpty(ctx, tb, "the same, another process", h.Another(tb, s), false)
	wantEmpty(ctx, tb, "another store", h.New(tb), true)
}

// tenants: every tenant once, and nobody's rows left out.
func tenants(tb TB, h Harness) {
	ctx := within(tb, h)
	s := h.New(tb)
	l, is := s.(stores.TenantLister)
	if !is {
		tb.Fatalf("a store with tenant columns does not list its tenants")
	}
	for _, want := range [][]string{nil, {"acme"}, {"acme", "zoo"}} {
		for _, t := range slices.Concat(want, want, stores.NonTenants) {
			h.Fill(tb, s, t)
		}
		if got, err := l.Tenants(ctx); err != nil || !slices.Equal(got, want) {
			tb.Fatalf("tenants %q, %v; want %q", got, err, want)
		}
	}
}

// nested: a cell whose prefix holds another's is found by names and by marks, and
// is not empty.
func nested(tb TB, h Harness) {
	ctx := within(tb, h)
	outer := h.New(tb)
	inner := h.Inside(tb, outer)
	if !outer.Location().Overlaps(inner.Location()) || !inner.Location().Overlaps(outer.Location()) {
		tb.Errorf("%s and %s do not overlap", outer.Location(), inner.Location())
	}
	if err := stores.Isolated(ctx, set(tb, outer), set(tb, inner)); !errors.Is(err, stores.ErrShared) {
		tb.Errorf("nested prefixes: %v, want ErrShared", err)
	}
	m, m2 := stores.NewMark(), stores.NewMark()
	ok(tb, "plant", inner.Plant(ctx, m))
	wantMark(ctx, tb, "the inner one's mark, from outside", outer, m, true)
	ok(tb, "plant", outer.Plant(ctx, m2))
	wantMark(ctx, tb, "the outer one's mark, from inside", inner, m2, false)
	ok(tb, "remove", inner.Remove(ctx, m))
	wantMark(ctx, tb, "removed", outer, m, false)
	wantMark(ctx, tb, "not removed", outer, m2, true)

	wantEmpty(ctx, tb, "outside, before", outer, true)
	n := stores.NewNonce()
	ok(tb, "write", inner.WriteNonce(ctx, n))
	wantNonce(ctx, tb, "the inner one's nonce, from outside", outer, "")
	wantEmpty(ctx, tb, "outside, with a cell inside", outer, false)
	ok(tb, "delete", inner.DeleteNonce(ctx))
	h.Fill(tb, outer, "acme")
	wantEmpty(ctx, tb, "inside, with something outside", inner, true)
}

// beside: letters in common are no overlap.
func beside(tb TB, h Harness) {
	ctx := within(tb, h)
	a := h.New(tb)
	b := h.Beside(tb, a)
	if a.Location().Overlaps(b.Location()) {
		tb.Errorf("%s and %s overlap", a.Location(), b.Location())
	}
	h.Fill(tb, b, "acme")
	ok(tb, "establish", func() error { _, err := b.Establish(ctx, stores.NewDeploymentID()); return err }())
	wantEmpty(ctx, tb, "beside a cell", a, true)
	wantIdentity(ctx, tb, "beside a cell", a, "")
	ok(tb, "isolated", stores.Isolated(ctx, set(tb, a), set(tb, b)))
}
