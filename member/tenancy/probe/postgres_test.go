// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/postgres"
)

func openSet(t *testing.T, url string) *stores.Set {
	t.Helper()
	s, err := postgres.Open(t.Context(), postgres.Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	set, err := stores.NewSet(s)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// serve is a process of a deployment with its listener.
func serve(t *testing.T, set *stores.Set) (string, stores.DeploymentID) {
	t.Helper()
	d, err := set.Pair(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := Start(Config{Listener: ln, Stores: set, Deployment: d, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return "http://" + l.Addr().String(), d
}

// A copy of a deployment's database has its deployment id, and is told from it by
// the nonce, whichever of the two the operator means and the process uses.
func TestCopyIsRefused(t *testing.T) {
	live := pgtest.DB(t)
	set := openSet(t, live)
	if _, err := set.Pair(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A template has no other connections.
	set.Authority().(*postgres.Store).Close()
	copied := clone(t, live)
	liveAt, d := serve(t, openSet(t, live))
	copyAt, same := serve(t, openSet(t, copied))
	if d != same {
		t.Fatalf("the copy is %s, not %s, so this shows nothing", same, d)
	}
	c := newClient(ClientConfig{})
	for name, at := range map[string][3]string{"the live one": {live, liveAt, copyAt}, "the copy": {copied, copyAt, liveAt}} {
		operator := openSet(t, at[0])
		nonces, err := operator.WriteNonces(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		w := Want{Deployment: d, Nonces: nonces}
		if err := c.Check(t.Context(), at[1], w); err != nil {
			t.Errorf("%s, given its own process: %v", name, err)
		}
		if err := c.Check(t.Context(), at[2], w); !errors.Is(err, ErrRefused) {
			t.Errorf("%s, given the other's process: %v, want ErrRefused", name, err)
		}
		if err := operator.DeleteNonces(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.Check(t.Context(), at[1], w); !errors.Is(err, ErrRefused) {
			t.Errorf("%s, with its nonce deleted: %v, want ErrRefused", name, err)
		}
	}
}

// clone copies a database by its URL.
func clone(t *testing.T, url string) string {
	t.Helper()
	base := url[:strings.LastIndexByte(url, '/')]
	name, query, _ := strings.Cut(url[len(base)+1:], "?")
	conn, err := pgx.Connect(t.Context(), base+"/postgres?"+query)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), "CREATE DATABASE "+name+"_copy TEMPLATE "+name); err != nil {
		t.Fatal(err)
	}
	return base + "/" + name + "_copy?" + query
}
