// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseURL(t *testing.T) {
	dir := t.TempDir()
	password := filepath.Join(dir, "password")
	if err := os.WriteFile(password, []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for raw, want := range map[string]struct {
		endpoints      string
		user, password string
		prefix         string
		tls            bool
	}{
		"etcd://h:2379":                          {"http://h:2379", "", "", DefaultPrefix, false},
		"etcd://h:2379/":                         {"http://h:2379", "", "", DefaultPrefix, false},
		"etcd://h:1,[::1]:2,10.0.0.1:3/a/b/":     {"http://h:1 http://[::1]:2 http://10.0.0.1:3", "", "", "/a/b/", false},
		"etcd://u:p%40w@h:1/x?tls=true":          {"https://h:1", "u", "p@w", "/x/", true},
		"etcd://u@h:1?password_file=" + password: {"http://h:1", "u", "s3cret", DefaultPrefix, false},
		"etcd://h:1?server_name=etcd.internal":   {"https://h:1", "", "", DefaultPrefix, true},
	} {
		cfg, opts, err := ParseURL(raw)
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		table := &Table{prefix: DefaultPrefix}
		for _, o := range opts {
			o(table)
		}
		if strings.Join(cfg.Endpoints, " ") != want.endpoints || cfg.Username != want.user || cfg.Password != want.password ||
			table.prefix != want.prefix || (cfg.TLS != nil) != want.tls {
			t.Errorf("%s: %+v, prefix %q", raw, cfg, table.prefix)
		}
	}
	for _, raw := range []string{
		"", "http://h:1", "etcd://", "etcd://h", "etcd://h:1,", "etcd://:1", "etcd://h:1?x=1", "etcd://h:1?tls=yes", "etcd://h:1?tls=true&tls=true",
		"etcd://h:1?tls=false&ca=x", "etcd://h:1?ca=" + filepath.Join(dir, "none"), "etcd://h:1?ca=" + password, "etcd://h:1?cert=" + password,
		"etcd://u@h:1", "etcd://:hunter2@h:1", "etcd://h:1#x", "etcd://h:1?ca=", "etcd://u:hunter2@h:1/%zz", "etcd://u:hunter2@h/x",
	} {
		if cfg, _, err := ParseURL(raw); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %+v, %v; want ErrInvalid", raw, cfg, err)
		} else if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: the error holds the password: %v", raw, err)
		}
	}
}

func TestCodec(t *testing.T) {
	r := cells.TenantRoute{
		TenantID: "t", State: cells.StateCopying, CellID: "a", Epoch: 8, Floor: 8, MoveID: "m", SourceCell: "a", TargetCell: "b", Base: 7,
		Deadline: time.Date(2031, 2, 3, 4, 5, 6, 7, time.UTC), Residue: []cells.Residue{{Cell: "c", Epoch: 1, Move: "m0"}}, Reason: "<&> \n ü",
		Revision: 99,
	}
	b, err := encode(r)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeValue(b)
	if r.Revision = 0; err != nil || !reflect.DeepEqual(got, r) {
		t.Fatalf("%+v, %v", got, err)
	}
}

func FuzzDecode(f *testing.F) {
	b, err := encode(cells.TenantRoute{TenantID: "t", State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"v":2}`))
	f.Add([]byte(`{"v":1,"route":null}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		r, err := decodeValue(in)
		if err != nil {
			if !errors.Is(err, cells.ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		again, err := encode(r)
		if err != nil {
			t.Fatal(err)
		}
		r.Revision = 0
		if r2, err := decodeValue(again); err != nil || !reflect.DeepEqual(r, r2) {
			t.Fatalf("%+v became %+v, %v", r, r2, err)
		}
	})
}

func TestOpenRefuses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := l.Addr().String()
	_ = l.Close()
	for _, p := range []string{"", " ", "a b", "ü", strings.Repeat("x", maxPrefix+1)} {
		if _, err := Open(t.Context(), clientv3.Config{Endpoints: []string{nobody}}, WithPrefix(p)); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("prefix %q: %v, want ErrInvalid", p, err)
		}
	}
	if _, err := Open(t.Context(), clientv3.Config{}); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("no endpoints: %v, want ErrInvalid", err)
	}
	if _, err := Open(t.Context(), clientv3.Config{Endpoints: []string{nobody}}, WithTimeout(100*time.Millisecond)); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("nobody there: %v, want ErrUnavailable", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(ctx, clientv3.Config{Endpoints: []string{nobody}}); !errors.Is(err, context.Canceled) {
		t.Errorf("an ended context: %v, want context.Canceled", err)
	}
}
