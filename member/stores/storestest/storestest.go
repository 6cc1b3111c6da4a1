// SPDX-License-Identifier: Apache-2.0

package storestest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
)

// TB is what a case needs of [testing.TB]. Fatalf does not return.
type TB interface {
	Helper()
	Context() context.Context
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// Harness says how to make the stores under test. New, Another, Fill, Garble and
// Down are required.
type Harness struct {
	// New returns a store that is empty and nobody else's. It is released with
	// tb.Cleanup, as all others are.
	New func(tb TB) stores.Store
	// Another returns one more handle on s, as another process of the cell has it.
	Another func(tb TB, s stores.Store) stores.Store
	// Fill puts something of a tenant into s; tenant may be one of stores.NonTenants if
	// Column is set.
	Fill func(tb TB, s stores.Store, tenant string)
	// Garble replaces the reserved value of the nonce by text.
	Garble func(tb TB, s stores.Store, text string)
	// Down returns a store that cannot be reached.
	Down func(tb TB) stores.Store
	// Inside returns a store in the bucket of outer, with a prefix below its own; Beside
	// one whose prefix only begins with the same letters. Nil: no buckets.
	Inside, Beside func(tb TB, outer stores.Store) stores.Store
	// Column: what belongs to a tenant says so in a column, which may name none.
	Column bool
	// Undecided: of two ids that are established at once the store may keep both, and
	// then answers ErrMismatch.
	Undecided bool
	// Patience bounds what must happen; 0 means 20 s.
	Patience time.Duration
}

// Case is one requirement.
type Case struct {
	Name string
	Run  func(tb TB, h Harness)
}

// Cases returns the cases that apply to h.
func Cases(h Harness) []Case {
	out := []Case{
		{"Establish", establish}, {"EstablishAtOnce", establishAtOnce}, {"Nonce", nonce}, {"NonceOfAnother", nonceOfAnother},
		{"Malformed", malformed}, {"Garbled", garbled}, {"NamesApart", namesApart}, {"Marks", marks}, {"Isolated", isolated},
		{"Empty", empty}, {"Ended", ended}, {"Down", down},
	}
	if h.Inside != nil {
		out = append(out, Case{"Nested", nested}, Case{"Beside", beside})
	}
	if h.Column {
		out = append(out, Case{"Tenants", tenants})
	}
	return out
}

// Run runs every case as a subtest.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, c := range Cases(h) {
		t.Run(c.Name, func(t *testing.T) { c.Run(t, h) })
	}
}

// within returns a context that ends when the harness's patience does.
func within(tb TB, h Harness) context.Context {
	if h.Patience == 0 {
		h.Patience = 20 * time.Second
	}
	ctx, cancel := context.WithTimeout(tb.Context(), h.Patience)
	tb.Cleanup(cancel)
	return ctx
}

func ok(tb TB, doing string, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatalf("%s: %v", doing, err)
	}
}

func wantNonce(ctx context.Context, tb TB, what string, s stores.Store, want stores.Nonce) {
	tb.Helper()
	got, err := s.ReadNonce(ctx)
	if want == "" {
		if !errors.Is(err, stores.ErrNoNonce) || got != "" {
			tb.Fatalf("%s: read %.8s, %v; want ErrNoNonce", what, got, err)
		}
		return
	}
	if err != nil || got != want {
		tb.Fatalf("%s: read %.8s, %v; want %.8s", what, got, err, want)
	}
}

func wantIdentity(ctx context.Context, tb TB, what string, s stores.Store, want stores.DeploymentID) {
	tb.Helper()
	got, err := s.Identity(ctx)
	if err != nil || got != (stores.Identity{Kind: s.Kind(), Deployment: want, Location: s.Location()}) {
		tb.Fatalf("%s: identity %+v, %v; want %s of %s at %s", what, got, err, want, s.Kind(), s.Location())
	}
}

func wantMark(ctx context.Context, tb TB, what string, s stores.Store, m stores.Mark, want bool) {
	tb.Helper()
	got, err := s.Visible(ctx, m)
	if err != nil || got != want {
		tb.Fatalf("%s: visible %v, %v; want %v", what, got, err, want)
	}
}

func wantEmpty(ctx context.Context, tb TB, what string, s stores.Store, want bool) {
	tb.Helper()
	got, holds, err := s.Empty(ctx)
	if err != nil || got != want || got != (holds == "") {
		tb.Fatalf("%s: empty %v, holds %q, %v; want %v, and what it holds named", what, got, holds, err, want)
	}
}

// every calls each method and returns the errors by name.
func every(ctx context.Context, s stores.Store) map[string]error {
	out := map[string]error{}
	_, out["Identity"] = s.Identity(ctx)
	_, out["Establish"] = s.Establish(ctx, stores.NewDeploymentID())
	out["WriteNonce"] = s.WriteNonce(ctx, stores.NewNonce())
	_, out["ReadNonce"] = s.ReadNonce(ctx)
	out["DeleteNonce"] = s.DeleteNonce(ctx)
	out["Plant"] = s.Plant(ctx, stores.NewMark())
	_, out["Visible"] = s.Visible(ctx, stores.NewMark())
	out["Remove"] = s.Remove(ctx, stores.NewMark())
	_, _, out["Empty"] = s.Empty(ctx)
	if l, is := s.(stores.TenantLister); is {
		_, out["Tenants"] = l.Tenants(ctx)
	}
	return out
}

// ended: a context that has ended ends every method.
func ended(tb TB, h Harness) {
	s := h.New(tb)
	ctx, cancel := context.WithCancel(within(tb, h))
	cancel()
	for name, err := range every(ctx, s) {
		if !errors.Is(err, context.Canceled) && !errors.Is(err, cells.ErrUnavailable) {
			tb.Errorf("%s with a context that has ended: %v", name, err)
		}
	}
}

// down: a store that cannot be reached says so, and decides nothing.
func down(tb TB, h Harness) {
	s := h.Down(tb)
	for name, err := range every(within(tb, h), s) {
		if !errors.Is(err, cells.ErrUnavailable) || errors.Is(err, stores.ErrNoNonce) {
			tb.Errorf("%s of a store that cannot be reached: %v, want ErrUnavailable", name, err)
		}
	}
}
