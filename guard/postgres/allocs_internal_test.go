// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"testing"

	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/internal/alloctest"
)

// noServer takes statements and answers nothing: what is left is the guard's part.
type noServer struct{}

func (noServer) exec(context.Context, string, ...any) error       { return nil }
func (noServer) row(context.Context, string, []any, ...any) error { return nil }
func (noServer) rows(context.Context, string, []any, func(func(...any) error) error) error {
	return nil
}

// What a guarded transaction's own statements allocate on this side of the driver is
// kept in testdata/allocs.txt.
func TestAllocs(t *testing.T) {
	cfg, err := newConfig(nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &core{config: cfg}
	ctx, a := t.Context(), guard.Admission{Tenant: "acme", Epoch: 7, Cell: "cell-a"}
	payload := struct {
		Account string `json:"account"`
		Cents   int64  `json:"cents"`
	}{"a-1", 1250}
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	alloctest.Check(t,
		alloctest.Path{Name: "admit", Run: func() { must(c.admit(ctx, noServer{}, a)) }},
		alloctest.Path{Name: "admit-closed", Run: func() { must(c.admitClosed(ctx, noServer{}, "acme", 7, "m1")) }},
		alloctest.Path{Name: "emit", Run: func() { _, err := c.emit(ctx, noServer{}, "account.changed", payload); must(err) }},
	)
}
