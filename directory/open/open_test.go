// SPDX-License-Identifier: Apache-2.0

package open_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/deploytest"
	"github.com/cloister-dev/cloister/directory/open"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAddresses(t *testing.T) {
	for _, a := range []string{"", "sqlite:", "file:x", "mysql://h/d", "postgres://[bad"} {
		if _, err := open.Open(t.Context(), a, open.Options{}); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v", a, err)
		}
		if _, err := open.Deployments(t.Context(), a, open.Options{}); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("lazily, %q: %v", a, err)
		}
	}
}

// A store that cannot be opened yet is unavailable, and used once it can.
func TestLazy(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	l, err := open.Deployments(t.Context(), "sqlite:"+filepath.Join(dir, "d.db"), open.Options{})
	if err != nil {
		t.Fatal(err)
	}
	audit := api.AuditEntry{At: time.Now(), Action: "test"}
	if _, err := l.Read(t.Context()); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("before there is a folder: %v", err)
	}
	if _, _, err := l.Place(t.Context(), deploy.Call{Tenant: "t"}, audit); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("before there is a folder: %v", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Change(t.Context(), "one", deploy.Register(deploytest.First("one")), audit); err != nil {
		t.Fatal(err)
	}
	if v, err := l.Read(t.Context()); err != nil || v.First() == nil {
		t.Errorf("%+v, %v", v, err)
	}
	if list, err := l.Audit(t.Context(), directory.AuditFilter{}); err != nil || len(list) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	if err := errors.Join(l.Ping(t.Context()), l.Close()); err != nil {
		t.Error(err)
	}
	if _, err := l.Read(t.Context()); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("closed: %v", err)
	}
}
