// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/sqlite"
)

const budgetChild = "CLOISTER_TEST_BUDGET_DB"

// spend reserves until nothing is left, charges every other reservation, dies with
// the rest unsettled, and prints what was granted.
func spend(ctx context.Context, path, name string) error {
	s, err := sqlite.Open(ctx, path)
	if err != nil {
		return err
	}
	m := cells.NewBudgetMeter(cells.WithBudgetStore(s.Budgets()), cells.WithBudget(60*time.Millisecond, time.Hour))
	for i := 0; ; i++ {
		id := cells.MoveID(fmt.Sprintf("%s-%d", name, i))
		err := m.Reserve(ctx, "t", id, 3*time.Millisecond)
		if errors.Is(err, cells.ErrBudget) {
			return nil
		}
		if err == nil && i%2 == 0 {
			err = m.Charge(ctx, "t", id, 2*time.Millisecond)
		}
		if err != nil {
			return err
		}
		fmt.Printf("granted %s\n", id)
	}
}

// Several processes spend one budget: what they were granted, and nothing else, is
// in the store, also after they have died.
func TestBudgetAcrossProcesses(t *testing.T) {
	if path := os.Getenv(budgetChild); path != "" {
		if err := spend(t.Context(), path, fmt.Sprintf("p%d", os.Getpid())); err != nil {
			t.Fatal(err)
		}
		os.Exit(0) // without closing anything
	}
	path := filepath.Join(t.TempDir(), "directory.db")
	s, err := sqlite.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var wg sync.WaitGroup
	var mu sync.Mutex
	granted := map[string]bool{}
	for range 3 {
		wg.Go(func() {
			cmd := exec.Command(os.Args[0], "-test.run=^TestBudgetAcrossProcesses$")
			cmd.Env = append(os.Environ(), budgetChild+"="+path)
			out, err := cmd.Output()
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
			mu.Lock()
			defer mu.Unlock()
			for _, line := range strings.Split(string(out), "\n") {
				if id, ok := strings.CutPrefix(line, "granted "); ok {
					granted[id] = true
				}
			}
		})
	}
	wg.Wait()
	m := cells.NewBudgetMeter(cells.WithBudgetStore(s.Budgets()), cells.WithBudget(60*time.Millisecond, time.Hour))
	a, err := m.Account(t.Context(), "t")
	if err != nil {
		t.Fatal(err)
	}
	if len(a.Entries) != len(granted) || len(granted) < 20 {
		t.Errorf("%d entries, %d were granted", len(a.Entries), len(granted))
	}
	var used time.Duration
	for _, e := range a.Entries {
		if !granted[string(e.Move)] {
			t.Errorf("entry %+v was granted to nobody", e)
		}
		if want := map[bool]time.Duration{true: 3 * time.Millisecond, false: 2 * time.Millisecond}[e.Reserved]; e.Pause != want {
			t.Errorf("entry %+v counts %v, want %v", e, e.Pause, want)
		}
		used += e.Pause
	}
	if used > 60*time.Millisecond || used <= 57*time.Millisecond || a.Left != 60*time.Millisecond-used {
		t.Errorf("%v were used of 60ms, %v are left", used, a.Left)
	}
}

// What is in a receipt stays, whatever is written to the file by this schema's rules.
func TestReceiptsCannotBeRewritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "directory.db")
	s, err := sqlite.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.AppendReceipt(t.Context(), "m", func([][]byte) (directory.ReceiptChange, error) {
		return directory.ReceiptChange{Entry: []byte("entry")}, nil
	}); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, q := range []string{`UPDATE receipts SET entry = 'other'`, `DELETE FROM receipts`} {
		if _, err := db.ExecContext(t.Context(), q); err == nil || !strings.Contains(err.Error(), "never") {
			t.Errorf("%s: %v", q, err)
		}
	}
	if got, err := s.Receipt(t.Context(), "m"); err != nil || len(got) != 1 || string(got[0]) != "entry" {
		t.Errorf("%q, %v", got, err)
	}
}
