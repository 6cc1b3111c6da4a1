// SPDX-License-Identifier: Apache-2.0

package open_test

import (
	"errors"
	"io/fs"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/table/open"
	"github.com/cloister-dev/cloister/table/remote"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// Each address leads to a table that keeps a row, and a second handle on it.
func TestOpen(t *testing.T) {
	dir := t.TempDir()
	m := cells.NewMemTable()
	defer m.Close()
	srv := httptest.NewServer(remote.Handler(m))
	defer srv.Close()
	pg := pgtest.DB(t)
	sep := "?"
	if strings.Contains(pg, "?") {
		sep = "&"
	}
	for _, address := range []string{
		"file:" + filepath.Join(dir, "routes"), "sqlite:" + filepath.Join(dir, "routes.db"), srv.URL, pg, pg + sep + "cells_schema=other",
	} {
		table, err := open.Open(t.Context(), address)
		if err != nil {
			t.Fatalf("%s: %v", address, err)
		}
		r, err := table.CompareAndSet(t.Context(), 0, cells.TenantRoute{TenantID: "t", State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1})
		if err != nil {
			t.Errorf("%s: %v", address, err)
		}
		if err := table.Close(); err != nil {
			t.Errorf("%s: %v", address, err)
		}
		again, err := open.Open(t.Context(), address, open.MustExist())
		if err != nil {
			t.Fatalf("%s: %v", address, err)
		}
		if got, err := again.Get(t.Context(), "t"); err != nil || got.Revision != r.Revision {
			t.Errorf("%s: %+v, %v", address, got, err)
		}
		if err := again.Close(); err != nil {
			t.Errorf("%s: %v", address, err)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := l.Addr().String()
	_ = l.Close()
	for address, want := range map[string]error{
		"":                                     cells.ErrInvalid,
		"routes.db":                            cells.ErrInvalid,
		"mysql://x":                            cells.ErrInvalid,
		"file:":                                cells.ErrInvalid,
		"sqlite://x":                           cells.ErrInvalid,
		"https://":                             cells.ErrInvalid,
		"https://u:hunter2@h":                  cells.ErrInvalid,
		"https://h/path":                       cells.ErrInvalid,
		"etcd://h":                             cells.ErrInvalid,
		"kube:A_B":                             cells.ErrInvalid,
		"postgres://u:hunter2@h:x/y":           cells.ErrInvalid,
		"postgres://u:hunter2@" + nobody + "/": cells.ErrUnavailable,
	} {
		table, err := open.Open(t.Context(), address)
		if !errors.Is(err, want) || table != nil {
			t.Errorf("%q: %v, %v; want %v", address, table, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: the error holds the password: %v", address, err)
		}
	}
	for _, kind := range []string{"file:", "sqlite:"} {
		path := filepath.Join(t.TempDir(), "none")
		if _, err := open.Open(t.Context(), kind+path, open.MustExist()); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v, want ErrNotExist", kind, err)
		}
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s was made: %v", path, err)
		}
	}
}
