// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cmd/cell/fleet"
)

// ask sends a request for the tenant and returns the code of the problem that it got,
// or "" for an answer of 200.
func (e *env) ask(tenant, method, path, body string) (code string, retry bool, title string) {
	e.t.Helper()
	req, err := http.NewRequestWithContext(e.t.Context(), method, e.Info.Edge+path, strings.NewReader(body))
	if err != nil {
		e.t.Fatal(err)
	}
	req.Header.Set("X-Tenant", tenant)
	if method == http.MethodGet {
		req.Header.Set("Accept", "text/event-stream")
	}
	resp, err := e.http.Do(req)
	if err != nil {
		e.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		return "", false, ""
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		e.t.Fatal(err)
	}
	var p struct {
		Code, Title string
		Retry       bool
	}
	if err := json.Unmarshal(b, &p); err != nil {
		e.t.Fatalf("%s is no problem document: %s", path, b)
	}
	return p.Code, p.Retry, p.Title
}

// While a cell's database is down its tenants are told so, soon and truly, for reads,
// writes and streams; its processes are not ready and say why; the other cell serves.
// A database that died is started again, and everything goes on.
func TestDatabaseDown(t *testing.T) {
	e := start(t, fleet.Config{Store: fleet.StorePostgres})
	a, b := e.tenant("acme", "cell-a"), e.tenant("globex", "cell-b")
	if _, err := a.Set(t.Context(), "n", "k", "kept", -1); err != nil {
		t.Fatal(err)
	}
	key := `{"namespace":"n","key":"k"}`
	cluster := e.Cluster("cell-a")
	if err := cluster.Kill(); err != nil { // on purpose: nobody starts it again
		t.Fatal(err)
	}
	down := func(when string) {
		t.Helper()
		for _, r := range [][3]string{{"POST", "/v1/memory.get", key}, {"POST", "/v1/memory.list", `{"namespace":"n"}`},
			{"POST", "/v1/memory.set", `{"namespace":"n","key":"k","value":1}`}, {"GET", "/v1/events", ""}} {
			begun := time.Now()
			code, retry, title := e.ask("acme", r[0], r[1], r[2])
			if took := time.Since(begun); code != "BACKEND_UNAVAILABLE" || !retry || took > 9*time.Second || !strings.Contains(title, "database") {
				t.Errorf("%s: %s answers %q retry %v %q after %s", when, r[1], code, retry, title, took)
			}
		}
	}
	down("at once")
	e.eventually("the process is not ready and says why", 20*time.Second, func() bool {
		ms, err := e.cl.Members(t.Context())
		for _, m := range ms {
			if err == nil && m.Cell == "cell-a" && !m.Ready && strings.Contains(m.Reason, "database") {
				resp, err := http.Get(m.ServiceURL + "/readyz")
				if err != nil {
					return false
				}
				resp.Body.Close()
				return resp.StatusCode == http.StatusServiceUnavailable
			}
		}
		return false
	})
	down("once it has lasted")
	if _, err := b.Set(t.Context(), "n", "k", 1, -1); err != nil {
		t.Errorf("the other cell: %v", err)
	}
	if err := cluster.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	served := func() bool {
		it, err := a.Get(t.Context(), "n", "k")
		return err == nil && string(it.Value) == `"kept"`
	}
	e.eventually("the tenant is served again", 20*time.Second, served)
	e.eventually("the process is ready again", 20*time.Second, func() bool {
		ms, err := e.cl.Members(t.Context())
		for _, m := range ms {
			if m.Cell == "cell-a" && !m.Ready {
				return false
			}
		}
		return err == nil
	})
	pid := cluster.PID()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e.eventually("the dead server is started again", 30*time.Second, func() bool { now := cluster.PID(); return now != 0 && now != pid })
	e.eventually("the tenant is served again", 30*time.Second, served)
}

// Nobody but the user of a fleet reads its tenants, enters its databases or sees a
// password among its processes' arguments.
func TestFleetIsPrivate(t *testing.T) {
	stores(t, func(t *testing.T, store string) {
		e := start(t, fleet.Config{Store: store})
		if _, err := e.tenant("acme", "cell-a").Set(t.Context(), "n", "k", "secret", -1); err != nil {
			t.Fatal(err)
		}
		const others = 0o007
		err := filepath.WalkDir(e.Layout.Dir, func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			st, err := d.Info()
			if err != nil {
				return nil // gone meanwhile
			}
			mode := st.Mode().Perm()
			if !d.IsDir() {
				if mode&others != 0 {
					t.Errorf("%s has mode %s", p, mode)
				}
				return nil
			}
			if mode&0o006 != 0 {
				t.Errorf("%s has mode %s", p, mode)
			}
			if mode&others == 0 {
				return filepath.SkipDir // nobody gets any further
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if store != fleet.StorePostgres {
			return
		}
		b, err := os.ReadFile(filepath.Join(e.Layout.Postgres("cell-a"), "password"))
		if err != nil {
			t.Fatal(err)
		}
		if seen := orphans(t, strings.TrimSpace(string(b))); len(seen) > 0 {
			t.Errorf("the password is in the arguments of %v", seen)
		}
		if err := canConnect(t, e.Cluster("cell-a").PublicURL("cell")); err == nil {
			t.Error("the database lets in whoever has no password")
		}
		if err := canConnect(t, e.Cluster("cell-a").URL("cell")); err != nil {
			t.Errorf("the database does not let in who has the password: %v", err)
		}
	})
}

// A process that is killed by name is another one afterwards, and the list shows it.
func TestKillByName(t *testing.T) {
	e := start(t, fleet.Config{})
	before, err := e.Info.Processes()
	if err != nil || len(before) != 4 || before["cell-a-1"] != e.Procs.Proc("cell-a-1").PID() {
		t.Fatalf("%v %v", before, err)
	}
	if _, err := e.Info.Kill("cell-c-1"); err == nil || !strings.Contains(err.Error(), "cell-a-1, cell-b-1, directory, edge") {
		t.Errorf("an unknown process: %v", err)
	}
	pid, err := e.Info.Kill("cell-a-1")
	if err != nil {
		t.Fatal(err)
	}
	e.eventually("the list shows the new process alone", 20*time.Second, func() bool {
		ms, err := e.cl.Members(t.Context())
		var now []string
		for _, m := range ms {
			if m.Cell == "cell-a" && !m.Replaced {
				now = append(now, fmt.Sprintf("%d %v", m.PID, m.Ready && m.PID != pid))
			}
		}
		return err == nil && len(now) == 1 && strings.HasSuffix(now[0], "true")
	})
}

func canConnect(t *testing.T, url string) error {
	c, err := pgx.Connect(t.Context(), url)
	if err != nil {
		return err
	}
	return c.Close(t.Context())
}

// A body that is too large gets 413, whether its length is said or not, and its tenant
// is served on.
func TestTooLargeBody(t *testing.T) {
	e := start(t, fleet.Config{MaxBody: 16 << 20})
	c := e.tenant("acme", "cell-a")
	for name, length := range map[string]int64{"length": 40 << 20, "chunked": -1} {
		body := io.LimitReader(endless{}, 40<<20)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, e.Info.Edge+"/v1/memory.set", body)
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = length
		req.Header.Set("X-Tenant", "acme")
		req.Header.Set("Expect", "100-continue")
		resp, err := e.http.Do(req)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusRequestEntityTooLarge || !strings.Contains(string(b), "TOO_LARGE") {
			t.Errorf("%s: %s %s", name, resp.Status, b)
		}
	}
	if _, err := c.Set(t.Context(), "n", "k", 1, -1); err != nil {
		t.Error(err)
	}
}

// endless reads as blanks.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}
