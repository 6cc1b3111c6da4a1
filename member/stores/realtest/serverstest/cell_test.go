// SPDX-License-Identifier: Apache-2.0

package serverstest_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/clickhouse"
	"github.com/cloister-dev/cloister/member/stores/open"
	"github.com/cloister-dev/cloister/member/stores/postgres"
	"github.com/cloister-dev/cloister/member/stores/realtest/serverstest"
	"github.com/cloister-dev/cloister/member/stores/s3"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

func openCell(t *testing.T, cfg open.Config) *open.Stores {
	t.Helper()
	s, err := open.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// A cell with all three stores: its processes pair them and echo the nonces of each;
// stores that are not its own, a registration that leaves one out, and a store that
// is away are told apart. Another cell on the same servers is isolated from it.
func TestCellOfThreeStores(t *testing.T) {
	firstPG := pgtest.DB(t) // the server outlives the test
	b, w := startS3(t), startClickHouse(t)
	bucket := b.bucket(t)
	config := func(pg, db, prefix string) open.Config {
		return open.Config{Postgres: postgres.Config{URL: pg},
			S3:         &s3.Config{Endpoint: b.URL, Location: stores.Location{Bucket: bucket, Prefix: prefix}, AccessKey: serverstest.AccessKey, SecretKey: serverstest.SecretKey},
			ClickHouse: &clickhouse.Config{URL: w.URL, Database: db, User: serverstest.User, Password: serverstest.Password}}
	}
	firstDB := w.database(t)
	first := config(firstPG, firstDB, "cells/a")
	process, operator := openCell(t, first), openCell(t, first)
	d, err := process.Pair(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := probe.Start(probe.Config{Listener: ln, Stores: process.Set, Deployment: d})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	at, c := "http://"+l.Addr().String(), probe.NewClient(probe.ClientConfig{Timeout: 30 * time.Second})
	check := func(w probe.Want) error {
		return probe.Wait(t.Context(), 30*time.Second, func(ctx context.Context) error {
			err := c.Check(ctx, at, w)
			if a := cells.AnswerOf(err); a != nil && a.Code == cells.CodeProbeUnreachable {
				return errors.Join(errAway, errors.New(a.Error())) // not waited for here
			}
			return err
		})
	}

	nonces, err := operator.WriteNonces(t.Context())
	if err != nil || len(nonces) != 3 {
		t.Fatalf("%d nonces, %v", len(nonces), err)
	}
	good := probe.Want{Deployment: d, Location: operator.Location(), Nonces: nonces}
	if err := check(good); err != nil {
		t.Fatalf("its own stores: %v", err)
	}
	for _, k := range operator.Kinds() {
		less := good
		less.Nonces = map[stores.Kind]stores.Nonce{}
		for o, n := range nonces {
			if o != k {
				less.Nonces[o] = n
			}
		}
		if err := check(less); !errors.Is(err, probe.ErrRefused) {
			t.Errorf("a registration without %s: %v, want ErrRefused", k, err)
		}
	}
	elsewhere := good
	elsewhere.Location.Prefix = "cells"
	if err := check(elsewhere); !errors.Is(err, probe.ErrRefused) {
		t.Errorf("another prefix: %v, want ErrRefused", err)
	}

	// A second cell on the same servers, and what must not become one.
	secondPG, secondDB := pgtest.DB(t), w.database(t)
	second := openCell(t, config(secondPG, secondDB, "cells/b"))
	if other, err := second.Pair(t.Context()); err != nil || other == d {
		t.Fatalf("the second cell is %s, %v", other, err)
	}
	if err := stores.Isolated(t.Context(), operator.Set, second.Set); err != nil {
		t.Errorf("two cells: %v", err)
	}
	if empty, holds, err := second.Empty(t.Context()); err != nil || !empty {
		t.Errorf("the second cell holds %s, %v", holds, err)
	}
	for name, cfg := range map[string]open.Config{
		"the first one's bucket and prefix": config(secondPG, secondDB, "cells/a"),
		"the first one's ClickHouse":        config(secondPG, firstDB, "cells/b"),
		"a new Postgres beside old stores":  config(pgtest.DB(t), firstDB, "cells/a"),
	} {
		if _, err := openCell(t, cfg).Pair(t.Context()); !errors.Is(err, stores.ErrMismatch) {
			t.Errorf("%s: %v, want ErrMismatch", name, err)
		}
	}
	shared := openCell(t, config(pgtest.DB(t), w.database(t), "cells/b/in"))
	if err := stores.Isolated(t.Context(), second.Set, shared.Set); !errors.Is(err, stores.ErrShared) {
		t.Errorf("a nested prefix: %v, want ErrShared", err)
	}
	if empty, _, err := second.Empty(t.Context()); err != nil || !empty {
		t.Errorf("marks were left behind: %v", err)
	}

	// A copy of the bucket's objects on another endpoint carries the id and the nonce of
	// its day; the nonce that is written after it was made is not there.
	twinDir := t.TempDir()
	if err := os.CopyFS(filepath.Join(twinDir, "data"), os.DirFS(filepath.Join(b.dir, "data"))); err != nil {
		t.Fatal(err)
	}
	twin := serverstest.StartS3(t, twinDir)
	copied := first
	copied.S3 = &s3.Config{Endpoint: twin.URL, Location: first.S3.Location, AccessKey: serverstest.AccessKey, SecretKey: serverstest.SecretKey}
	mistaken := openCell(t, copied)
	if same, err := mistaken.Deployment(t.Context()); err != nil || same != d {
		t.Fatalf("the copy is %s, %v, so this shows nothing", same, err)
	}
	if nonces, err = mistaken.WriteNonces(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := check(probe.Want{Deployment: d, Location: operator.Location(), Nonces: nonces}); !errors.Is(err, probe.ErrRefused) {
		t.Errorf("an operator on a copy of the bucket: %v, want ErrRefused", err)
	}

	b.put(t, second.Location(), "docs/1", "text")
	w.run(t, firstDB, "CREATE TABLE notes (tenant String) ENGINE = Log")
	w.run(t, firstDB, "INSERT INTO notes VALUES ('acme')")
	if empty, holds, err := second.Empty(t.Context()); err != nil || empty {
		t.Errorf("with an object: empty %v, %s, %v", empty, holds, err)
	}
	if got, err := operator.Tenants(t.Context()); err != nil || !slices.Equal(got, []string{"acme"}) {
		t.Errorf("tenants %q, %v", got, err)
	}

	w.Stop()
	if err := check(good); !errors.Is(err, errAway) {
		t.Errorf("with ClickHouse away: %v, want PROBE_UNREACHABLE", err)
	}
}

var errAway = errors.New("away")
