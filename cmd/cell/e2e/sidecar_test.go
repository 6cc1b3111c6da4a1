// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
)

// behindSidecar is an example of another language behind a sidecar: need installs
// what it takes, runs is what runs it.
func behindSidecar(t *testing.T, need, example string, runs ...string) fleet.Service {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "../../../scripts/"+need).CombinedOutput(); err != nil {
		t.Fatalf("scripts/%s: %v\n%s", need, err, out)
	}
	service, err := filepath.Abs("../../../guard/postgres/examples/" + example)
	if err != nil {
		t.Fatal(err)
	}
	cmd := []string{filepath.Join(bin, "cell"), "sidecar", "--listen", "{listen}", "--store", "{store}", "--dsn", "{dsn}",
		"--tables", "memory_versions:tenant", "--health-path", "/healthz", "--"}
	return fleet.Service{
		Command: append(append(cmd, runs...), service, "{state}"), // the last word only marks the process
		Env:     map[string]string{"DATABASE_URL": "{dsn}"},
	}
}

// A service that is not in Go lives in cells: its tenants move under load, with
// nothing lost and nothing refused, and its processes are killed. SQL functions of a
// guard are there on Postgres only.
func TestOtherLanguagesBehindASidecar(t *testing.T) {
	t.Run("python", func(t *testing.T) {
		livesBehindSidecar(t, behindSidecar(t, "need-python", "python/memory.py", "/usr/bin/python3"))
	})
	t.Run("node", func(t *testing.T) { livesBehindSidecar(t, behindSidecar(t, "need-node", "node/memory.js", "node")) })
}

func livesBehindSidecar(t *testing.T, service fleet.Service) {
	e := start(t, fleet.Config{Store: fleet.StorePostgres, Service: service, Cells: []fleet.Cell{{Name: "cell-a", Replicas: 2}, {Name: "cell-b"}}})
	moving, other := e.tenant("moving", "cell-a"), e.tenant("other", "cell-a")
	h := &load.Hammer{Client: moving, Clients: 4, Keys: 20, Pause: 3 * time.Millisecond}
	ho := &load.Hammer{Client: other, Clients: 2, Keys: 10, Pause: 5 * time.Millisecond}
	stop, stopOther := e.hammer(h), e.hammer(ho)
	for i, to := range []string{"cell-b", "cell-a", "cell-b"} {
		mv := e.settle(e.startMove("moving", to, fmt.Sprint("there-", i)).ID)
		if got := e.cellOf("moving"); string(got) != to {
			t.Errorf("move %d: %s in %s, state %s", i, mv.ID, got, mv.State)
		}
	}
	e.eventually("the tenant is written in its new cell", 20*time.Second, func() bool {
		ops := h.Ops()
		return len(ops) > 0 && ops[len(ops)-1].Cell == "cell-b"
	})
	mustBeClean(t, "moving tenant", stop(), false)
	mustBeClean(t, "other tenant", stopOther(), false)

	// A sidecar that is killed takes its service with it, and both come back.
	mark := e.Layout.Dir
	stop = e.hammer(&load.Hammer{Client: other, Clients: 4, Keys: 10, Namespace: "kills", Pause: 3 * time.Millisecond})
	for _, name := range []string{"cell-a-1", "cell-a-2"} {
		e.kill(name)
		if err := load.WaitServed(t.Context(), other); err != nil {
			t.Fatal(err)
		}
	}
	// A service that dies takes its sidecar with it.
	before := e.Procs.Proc("cell-a-1").PID()
	for _, pid := range children(t, before) {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	e.eventually("the sidecar runs again", 20*time.Second, func() bool {
		pid := e.Procs.Proc("cell-a-1").PID()
		return pid != 0 && pid != before
	})
	mustBeClean(t, "tenant whose processes are killed", stop(), true)
	e.Close()
	if left := orphans(t, mark); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
}

// children are the processes that a process has started; at least one.
func children(t *testing.T, parent int) (out []int) {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range stats {
		b, err := os.ReadFile(s)
		if err != nil {
			continue // it has ended
		}
		// pid (name) state ppid ...; the name may hold anything but is the last to do so.
		rest := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if len(rest) > 1 && rest[1] == fmt.Sprint(parent) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(s)))
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, pid)
		}
	}
	if len(out) == 0 {
		t.Fatalf("process %d has no children", parent)
	}
	return out
}

// Without a store a service is stateless: any of its cells can answer, and moves
// have nothing to carry.
func TestStatelessBehindASidecar(t *testing.T) {
	e := start(t, fleet.Config{Service: fleet.Service{Command: []string{filepath.Join(bin, "cell"), "sidecar", "--listen", "{listen}", "--",
		"sh", "-c", "exec /usr/bin/python3 -c 'import http.server, os\n" +
			"class H(http.server.BaseHTTPRequestHandler):\n" +
			"    def do_GET(self):\n" +
			"        body = (os.environ[\"CELL_NAME\"] + \" \" + self.headers[\"Cell-Tenant\"] + \" \" + self.headers[\"Cell-Epoch\"]).encode()\n" +
			"        self.send_response(200); self.send_header(\"Content-Length\", str(len(body))); self.end_headers(); self.wfile.write(body)\n" +
			"http.server.ThreadingHTTPServer((\"127.0.0.1\", int(os.environ[\"PORT\"])), H).serve_forever()'"}}})
	if err := (fleet.Mover{Client: e.cl}).Place(t.Context(), "acme", "cell-a"); err != nil {
		t.Fatal(err)
	}
	get := func() string {
		a := e.send(http.MethodGet, e.Info.Edge+"/", http.Header{"X-Tenant": {"acme"}, "Cell-Tenant": {"globex"}}, nil)
		if a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
		return a.body
	}
	if got := get(); got != "cell-a acme 1" {
		t.Errorf("before the move: %q", got)
	}
	e.settle(e.startMove("acme", "cell-b", "stateless").ID)
	if got := get(); got != "cell-b acme 3" {
		t.Errorf("after the move: %q", got)
	}
}
