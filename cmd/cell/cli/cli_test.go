// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/cli"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"routes": routes,
		"cell": func() {
			os.Exit(cli.Main(context.Background(), "test", os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
		},
	})
}

// routes writes rows into a table in a file: routes FILE TENANT:CELL:EPOCH...
func routes() {
	t := cells.NewFileTable(os.Args[1])
	for _, arg := range os.Args[2:] {
		var tenant cells.TenantID
		var cell cells.CellID
		var epoch cells.Epoch
		if _, err := fmt.Sscanf(strings.ReplaceAll(arg, ":", " "), "%s %s %d", &tenant, &cell, &epoch); err != nil {
			panic(err)
		}
		old, err := t.Get(context.Background(), tenant)
		if err != nil && !errors.Is(err, cells.ErrNotFound) {
			panic(err)
		}
		r := cells.TenantRoute{TenantID: tenant, State: cells.StateActive, CellID: cell, Epoch: epoch, Floor: epoch}
		if _, err := t.CompareAndSet(context.Background(), old.Revision, r); err != nil {
			panic(err)
		}
	}
	if err := t.Close(); err != nil {
		panic(err)
	}
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata/script", RequireUniqueNames: true, Setup: withDirectory, Cmds: map[string]func(*testscript.TestScript, bool, []string){"id": idOf}})
}

// docs/cli is what the commands say of themselves; `make docs` writes it again.
func TestReferenceIsCurrent(t *testing.T) {
	dir := t.TempDir()
	var out, errw bytes.Buffer
	if code := cli.Main(t.Context(), "test", []string{"docs", "--dir", dir}, os.Stdin, &out, &errw); code != 0 {
		t.Fatalf("cell docs: %d %s", code, errw.String())
	}
	const kept = "../../../docs/cli"
	fresh, _ := filepath.Glob(filepath.Join(dir, "*.md"))
	old, _ := filepath.Glob(filepath.Join(kept, "*.md"))
	if len(fresh) != len(old) {
		t.Errorf("%d commands, %d pages in docs/cli; run: make docs", len(fresh), len(old))
	}
	for _, f := range fresh {
		a, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(kept, filepath.Base(f)))
		if err != nil || !bytes.Equal(a, b) {
			t.Errorf("docs/cli/%s is not current; run: make docs", filepath.Base(f))
		}
	}
}
