// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/provision"
)

// run runs a command of the operator's, which must end with the code.
func (e *env) run(code int, args ...string) (stdout, stderr string) {
	e.t.Helper()
	cmd := exec.CommandContext(e.t.Context(), filepath.Join(bin, "cell"), append([]string{"--fleet", e.Layout.Dir}, args...)...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var ee *exec.ExitError
	if err != nil && !errors.As(err, &ee) || cmd.ProcessState.ExitCode() != code {
		e.t.Fatalf("cell %s: %v, want exit code %d\n%s%s", strings.Join(args, " "), err, code, out.String(), errs.String())
	}
	return out.String(), errs.String()
}

func (e *env) provisioned(cell cells.CellID) api.Provisioned {
	e.t.Helper()
	var p api.Provisioned
	e.eventually("the directory tells of "+string(cell), 20*time.Second, func() bool {
		var err error
		p, err = e.cl.ProvisionedCell(e.t.Context(), cell, false)
		return err == nil
	})
	return p
}

// A third cell is made while the fleet runs, gets a tenant under load, is upgraded and
// emptied under load without a failed request, refuses to go while it holds anybody, and
// leaves nothing. The directory is killed in the middle of each.
func TestProvisionUpgradeDrainRetire(t *testing.T) {
	e := start(t, fleet.Config{Store: fleet.StoreSQLite, Cells: []fleet.Cell{{Name: "cell-a"}, {Name: "cell-b"}}})
	memory := []string{filepath.Join(bin, "memory"), "--listen", "{listen}", "--store", "{store}", "--dsn", "{dsn}"}
	e.run(0, append([]string{"versions", "add", "v2", "--"}, append(memory, "-v")...)...)
	e.run(0, "cells", "provision", "c3", "--version", "v1", "--jurisdiction", "eu", "--replicas", "2", "--detach")
	e.kill("directory")
	out, _ := e.run(0, "--json", "cells", "status", "c3", "--follow")
	var p api.Provisioned
	if err := json.Unmarshal([]byte(out), &p); err != nil || !p.Progress.Reached || p.Status.Ready != 2 || p.Status.Version != "v1" || p.Cell.State != api.CellServing {
		t.Fatalf("%v\n%s", err, out)
	}
	e.run(0, "versions", "remove", "v2", "--yes")
	e.run(0, append([]string{"versions", "add", "v2", "--"}, append(memory, "-v")...)...)

	c := e.tenant("acme", "cell-a")
	if err := c.Fill(t.Context(), "bulk", 50, 100, func(int) {}); err != nil {
		t.Fatal(err)
	}
	stop := e.hammer(&load.Hammer{Client: c, Clients: 4, Keys: 8, Pause: 5 * time.Millisecond})
	if mv := e.settle(e.startMove("acme", "c3", "there").ID); mv.State != api.MoveDone {
		t.Fatalf("move: %s %s", mv.State, mv.Reason)
	}

	// An upgrade replaces both processes; the directory is away for some of it.
	before := e.pids("c3-")
	if _, err := e.cl.UpgradeCell(t.Context(), "c3", api.UpgradeRequest{Version: "v2", Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	e.eventually("the upgrade is under way", 30*time.Second, func() bool {
		for name, pid := range e.pids("c3-") {
			if before[name] != pid {
				return true
			}
		}
		return false
	})
	e.kill("directory")
	e.run(0, "cells", "status", "c3", "--follow")
	p = e.provisioned("c3")
	after := e.pids("c3-")
	if p.Status.Version != "v2" || p.Cell.Version != "v2" || p.Status.Updated != 2 || len(after) != 2 {
		t.Fatalf("after the upgrade: %+v, processes %v", p.Status, after)
	}
	for _, pid := range after {
		for _, old := range before {
			if pid == old {
				t.Errorf("process %d was not replaced", pid)
			}
		}
	}
	// A version that does not start is given up, and the old one serves on.
	e.run(0, "versions", "add", "broken", "--", filepath.Join(bin, "memory"), "--no-such-flag")
	if _, err := e.cl.UpgradeCell(t.Context(), "c3", api.UpgradeRequest{Version: "broken", Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	e.eventually("the broken version is reported", 60*time.Second, func() bool {
		p := e.provisioned("c3")
		return p.Status.Phase == provision.PhaseFailed && strings.Contains(p.Status.Message, "ended") && p.Status.Ready >= 2
	})
	e.run(0, "cells", "upgrade", "c3", "--version", "v2", "--replicas", "1")
	if p := e.provisioned("c3"); p.Status.Replicas != 1 || p.Status.Version != "v2" {
		t.Errorf("after going back: %+v", p.Status)
	}

	// Not while it serves, not while somebody is there.
	if _, errs := e.run(3, "cells", "retire", "c3", "--yes"); !strings.Contains(errs, "drain it first") {
		t.Errorf("retire of a serving cell says %q", errs)
	}
	if _, err := e.cl.DrainCell(t.Context(), "c3", api.DrainRequest{Actor: "test", Into: []cells.CellID{"cell-b"},
		Settings: api.CampaignSettings{Force: true, UndoWindow: "1h"}}); err != nil {
		t.Fatal(err)
	}
	e.kill("directory")
	e.run(0, "cells", "status", "c3", "--follow")
	if at := e.cellOf("acme"); at != "cell-b" {
		t.Errorf("acme is in %s", at)
	}
	if _, errs := e.run(3, "cells", "retire", "c3", "--yes"); !strings.Contains(errs, "acme can go back there until") {
		t.Errorf("retire of a cell with an undo window says %q", errs)
	}
	if out, _ := e.run(0, "cells", "status", "c3", "--left"); !strings.Contains(out, "acme has rows in its table") {
		t.Errorf("what is left:\n%s", out)
	}
	e.run(0, "move", "close-window", "acme", "--yes")
	e.eventually("nothing is left", 60*time.Second, func() bool {
		p, err := e.cl.ProvisionedCell(t.Context(), "c3", true)
		return err == nil && p.Left != nil && p.Left.Total == 0 && p.Left.Unasked == ""
	})
	e.run(0, "cells", "retire", "c3", "--yes", "--detach")
	e.kill("directory")
	e.run(0, "cells", "status", "c3", "--follow")
	mustBeClean(t, "acme", stop(), false)

	e.gone("c3")
	list, err := e.cl.Cells(t.Context())
	if err != nil || slices.ContainsFunc(list, func(c api.Cell) bool { return c.ID == "c3" }) {
		t.Errorf("cells after the retirement: %+v, %v", list, err)
	}
	// The name can be used again, with an empty store.
	e.run(0, "cells", "provision", "c3", "--version", "v2")
	if p := e.provisioned("c3"); p.Cell == nil || p.Cell.Tenants != 0 || p.Status.Phase != provision.PhaseRunning {
		t.Errorf("the second c3: %+v", p)
	}
}

// pids are the processes whose names begin so.
func (e *env) pids(begin string) map[string]int {
	out := map[string]int{}
	for _, name := range e.Procs.Names() {
		if p := e.Procs.Proc(name); p != nil && strings.HasPrefix(name, begin) && p.PID() != 0 {
			out[name] = p.PID()
		}
	}
	return out
}

// gone checks that nothing of a retired cell is left but its logs.
func (e *env) gone(cell string) {
	e.t.Helper()
	if p := e.pids(cell + "-"); len(p) > 0 {
		e.t.Errorf("processes of %s run: %v", cell, p)
	}
	if o := orphans(e.t, e.Layout.Cell(cell)+"/"); len(o) > 0 {
		e.t.Errorf("orphans: %v", o)
	}
	for _, path := range []string{e.Layout.Cell(cell), e.Layout.Certs(cell), e.Layout.Postgres(cell), filepath.Join(e.Layout.Dir, "retired")} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			e.t.Errorf("%s: %v, want that it is not there", path, err)
		}
	}
}
