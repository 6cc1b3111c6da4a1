// SPDX-License-Identifier: Apache-2.0

package etcdtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/etcd"
)

// A compare-and-set whose answer is lost takes its own write for its own, and no
// other.
func TestLostAnswer(t *testing.T) {
	for name, c := range map[string]struct {
		stamp string
		send  bool // the transaction is carried out before its answer is lost
		// meanwhile writes through another handle before the error is seen; row is the
		// tenant's row then.
		meanwhile func(t *testing.T, other *etcd.Table, row cells.TenantRoute)
		want      error
		cause     bool // the error says what the transaction met
	}{
		"carried out": {stamp: "mine", send: true},
		"carried out and overwritten": {stamp: "mine", send: true, meanwhile: func(t *testing.T, other *etcd.Table, row cells.TenantRoute) {
			for i := range 3 {
				row = cas(t, other, row.Revision, stamped(row, fmt.Sprintf("other-%d", i)))
			}
		}},
		"not carried out": {stamp: "mine", want: cells.ErrUnavailable, cause: true},
		"another won": {stamp: "mine", want: cells.ErrConflict, meanwhile: func(t *testing.T, other *etcd.Table, row cells.TenantRoute) {
			cas(t, other, row.Revision, stamped(row, "other"))
		}},
		"another won, then more": {stamp: "mine", want: cells.ErrConflict, meanwhile: func(t *testing.T, other *etcd.Table, row cells.TenantRoute) {
			row = cas(t, other, row.Revision, stamped(row, "other"))
			row.EventMark = 9
			cas(t, other, row.Revision, stamped(row, "mine")) // the same row, behind another
		}},
		"without a stamp": {send: true, want: cells.ErrUnavailable, cause: true},
	} {
		for _, create := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/create=%v", name, create), func(t *testing.T) {
				p := prefix()
				other := open(t, config(server.URL), etcd.WithPrefix(p))
				armed := false
				cfg := config(server.URL)
				cfg.DialOptions = []grpc.DialOption{grpc.WithChainUnaryInterceptor(
					func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
						if !armed || !strings.HasSuffix(method, "/Txn") {
							return invoke(ctx, method, req, reply, cc, opts...)
						}
						armed = false
						if c.send {
							if err := invoke(ctx, method, req, reply, cc, opts...); err != nil {
								t.Error(err)
							}
						}
						if c.meanwhile != nil {
							cur, err := other.Get(t.Context(), "t")
							if errors.Is(err, cells.ErrNotFound) {
								cur, err = row("t"), nil
							}
							if err != nil {
								t.Error(err)
							}
							c.meanwhile(t, other, cur)
						}
						return status.Error(codes.Unavailable, "the answer was lost")
					})}
				table := open(t, cfg, etcd.WithPrefix(p))
				next := row("t")
				if !create {
					next = cas(t, table, 0, stamped(next, "first"))
				}
				old := next.Revision
				next.EventMark, next.Stamp = 9, c.stamp
				armed = true
				got, err := table.CompareAndSet(t.Context(), old, next)
				if armed {
					t.Fatal("no transaction was sent")
				}
				if !errors.Is(err, c.want) {
					t.Fatalf("%+v, %v; want %v", got, err, c.want)
				}
				if c.cause && (!strings.Contains(err.Error(), "unknown") || !strings.Contains(err.Error(), "the answer was lost")) {
					t.Errorf("the error says %q", err)
				}
				if err != nil {
					return
				}
				// The revision is that of the write itself.
				w := watch(t, other, got.Revision-1)
				up, err := w.Next(t.Context())
				if err != nil || len(up.Routes) == 0 || up.Routes[0].Stamp != "mine" || up.Routes[0].Revision != got.Revision {
					t.Fatalf("at the revision %d that was returned the table had %+v, %v", got.Revision, up, err)
				}
			})
		}
	}
}

// What is below the prefix and is no row of this format is refused, and is not
// written over.
func TestForeignValues(t *testing.T) {
	bare := client(t, server)
	p := prefix()
	table := open(t, config(server.URL), etcd.WithPrefix(p))
	cas(t, table, 0, row("good"))
	stored, err := bare.Get(t.Context(), p+"routes/good")
	if err != nil {
		t.Fatal(err)
	}
	value := string(stored.Kvs[0].Value)
	for name, v := range map[string]string{
		"empty":           "",
		"no JSON":         "nonsense",
		"no version":      `{"route":{}}`,
		"version zero":    strings.Replace(value, `"v":1`, `"v":0`, 1),
		"newer":           strings.Replace(value, `"v":1`, `"v":2`, 1),
		"unknown field":   strings.Replace(value, `"v":1`, `"v":1,"novel":1`, 1),
		"unknown inside":  strings.Replace(value, `"epoch":1`, `"epoch":1,"novel":1`, 1),
		"something after": value + "{}",
		"another tenant":  value,
	} {
		put, err := bare.Put(t.Context(), p+"routes/bad", v)
		if err != nil {
			t.Fatal(err)
		}
		_, getErr := table.Get(t.Context(), "bad")
		_, listErr := table.List(t.Context(), cells.ListOptions{})
		_, casErr := table.CompareAndSet(t.Context(), 0, row("bad"))
		w := watch(t, table, cells.Revision(put.Header.Revision-1))
		for what, err := range map[string]error{"Get": getErr, "List": listErr, "CompareAndSet": casErr, "Watch": failure(t, w)} {
			if !errors.Is(err, cells.ErrInvalid) {
				t.Errorf("%s: %s: %v, want ErrInvalid", name, what, err)
			}
			if name == "newer" && !strings.Contains(err.Error(), "newer version") {
				t.Errorf("%s says %q of a newer format", what, err)
			}
		}
		if now, err := bare.Get(t.Context(), p+"routes/bad"); err != nil || string(now.Kvs[0].Value) != v {
			t.Errorf("%s: was written over: %v", name, err)
		}
	}
}
