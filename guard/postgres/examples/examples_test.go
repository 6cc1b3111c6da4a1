// SPDX-License-Identifier: Apache-2.0

package examples_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

var table = guard.Table{Name: "memory_versions", TenantColumn: "tenant"}

// language is one of the examples.
type language struct {
	name    string
	need    string   // the script that installs what it needs
	command []string // runs the service
	script  []string // runs one program text, given as the last argument
	// unadmitted writes a row without an admission and prints the SQLSTATE.
	unadmitted string
}

const insert = `INSERT INTO memory_versions VALUES ('acme', 'n', 'bare', 1, '1', 1, 1, '')`

var languages = []language{
	{"python", "need-python", []string{"/usr/bin/python3", "python/memory.py"}, []string{"/usr/bin/python3", "-c"}, `
import os, psycopg2
conn = psycopg2.connect(os.environ["DATABASE_URL"])
try:
    conn.cursor().execute("""` + insert + `""")
    print("written")
except psycopg2.Error as e:
    print(e.pgcode)
`},
	{"node", "need-node", []string{"node", "node/memory.js"}, []string{"node", "-e"}, `
const { Client } = require(process.cwd() + '/node/node_modules/pg');
const db = new Client({ connectionString: process.env.DATABASE_URL });
db.connect().then(() => db.query("` + insert + `")).then(() => 'written', (e) => e.code).then((s) => { console.log(s); return db.end(); });
`},
}

// service is a running example on a database of its own.
type service struct {
	t    *testing.T
	base string
	url  string
	pool *pgxpool.Pool
	g    *postgres.Guard
}

func start(t *testing.T, l language) *service {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), filepath.Join("../../../scripts", l.need)).CombinedOutput(); err != nil {
		t.Fatalf("scripts/%s: %v\n%s", l.need, err, out)
	}
	s := &service{t: t, url: pgtest.DB(t)}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.base = "http://" + ln.Addr().String()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	_ = ln.Close()
	cmd := exec.Command(l.command[0], l.command[1:]...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+s.url, "PORT="+port)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("%s said: %s", l.name, out.Bytes())
		}
	})
	s.eventually("the service answers", func() bool {
		resp, err := http.Get(s.base + "/healthz")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	if s.pool, err = pgxpool.New(t.Context(), s.url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.pool.Close)
	if s.g, err = postgres.New(s.pool); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.g.Close)
	s.must(s.g.Install(t.Context(), []guard.Table{table}), "install")
	return s
}

func (s *service) must(err error, what string) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("%s: %v", what, err)
	}
}

func (s *service) eventually(what string, ok func() bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 60*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			s.t.Fatalf("not after a minute: %s", what)
		case <-tick.C:
		}
	}
}

type reply struct {
	status   int
	fenced   string
	Code     string
	Version  int64
	EventSeq int64 `json:"event_seq"`
	Epoch    int64
	Cell     string
	Value    json.RawMessage
	err      error
}

// call is a request as the sidecar passes it on.
func (s *service) call(op string, epoch int, key, value string) (r reply) {
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, s.base+"/v1/memory."+op,
		strings.NewReader(fmt.Sprintf(`{"namespace":"n","key":%q,"value":%q}`, key, value)))
	if err != nil {
		return reply{err: err}
	}
	req.Header = http.Header{"Cell-Tenant": {"acme"}, "Cell-Epoch": {fmt.Sprint(epoch)}, "Cell-Cell": {"cell-a"}, "Content-Type": {"application/json"}}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	r = reply{status: resp.StatusCode, fenced: resp.Header.Get("Cell-Fenced"), err: err}
	if err == nil {
		r.err = json.Unmarshal(b, &r)
	}
	return r
}

func (s *service) rows() (n int) {
	s.t.Helper()
	s.must(s.pool.QueryRow(s.t.Context(), `SELECT count(*) FROM memory_versions`).Scan(&n), "count")
	return n
}

func each(t *testing.T, f func(s *service, l language)) {
	for _, l := range languages {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			f(start(t, l), l)
		})
	}
}

func TestExamples(t *testing.T) {
	each(t, func(s *service, l language) {
		t, ctx := s.t, s.t.Context()
		s.must(s.g.OpenFence(ctx, cells.FenceOrder{Tenant: "acme", Epoch: 3, Floor: 3}), "open")
		for i := range 2 {
			if r := s.call("set", 3, "k", fmt.Sprint("v", i)); r.err != nil || r.status != 200 || r.Version != int64(i+1) || r.EventSeq != int64(i+1) || r.Epoch != 3 || r.Cell != "cell-a" {
				t.Fatalf("a write: %+v", r)
			}
		}
		if r := s.call("get", 3, "k", ""); r.err != nil || r.status != 200 || string(r.Value) != `"v1"` {
			t.Errorf("a read: %+v", r)
		}
		for _, op := range []string{"set", "get", "history"} {
			for _, epoch := range []int{2, 4} {
				if r := s.call(op, epoch, "k", "stale"); r.err != nil || r.status != 409 || r.fenced != "true" {
					t.Errorf("%s at epoch %d: %+v", op, epoch, r)
				}
			}
		}
		events, err := s.g.Events(ctx, "acme", 0, 10)
		if err != nil || len(events) != 2 || events[1].Seq != 2 || events[1].Type != "memory.set" || events[1].Epoch != 3 || events[1].Cell != "cell-a" {
			t.Errorf("the outbox has %+v, %v", events, err)
		}
		cmd := exec.CommandContext(ctx, l.script[0], append(l.script[1:], l.unadmitted)...)
		cmd.Env = append(os.Environ(), "DATABASE_URL="+s.url)
		out, err := cmd.CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != guard.SQLState {
			t.Errorf("a write without an admission: %q, %v; want %s", got, err, guard.SQLState)
		}
		if n := s.rows(); n != 2 {
			t.Errorf("%d rows", n)
		}
	})
}

// The close of a move waits for the transaction that a service in another language
// has open.
func TestCloseWaitsForTheService(t *testing.T) {
	each(t, func(s *service, _ language) {
		t, ctx := s.t, s.t.Context()
		s.must(s.g.OpenFence(ctx, cells.FenceOrder{Tenant: "acme", Epoch: 3, Floor: 3}), "open")
		// The service's INSERT, behind its admission, waits for this lock.
		tx, err := s.pool.Begin(ctx)
		s.must(err, "begin")
		defer tx.Rollback(context.WithoutCancel(ctx))
		_, err = tx.Exec(ctx, `LOCK TABLE memory_versions IN SHARE ROW EXCLUSIVE MODE`)
		s.must(err, "lock")
		waiting := func(kind string) bool {
			var n int
			s.must(s.pool.QueryRow(ctx, `SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
				WHERE d.datname = current_database() AND locktype = $1 AND NOT granted`, kind).Scan(&n), "locks")
			return n == 1
		}
		written := make(chan reply, 1)
		go func() { written <- s.call("set", 3, "k", "v") }()
		s.eventually("the write waits", func() bool { return waiting("relation") })
		closed := make(chan error, 1)
		go func() { closed <- s.g.CloseFence(ctx, cells.FenceOrder{Tenant: "acme", Epoch: 4, Move: "m"}) }()
		s.eventually("the close waits", func() bool { return waiting("advisory") })
		select {
		case err := <-closed:
			t.Fatalf("close returned while the transaction was open: %v", err)
		case r := <-written:
			t.Fatalf("the write did not wait: %+v", r)
		default:
		}
		s.must(tx.Rollback(ctx), "rollback")
		if r := <-written; r.err != nil || r.status != 200 || r.Version != 1 {
			t.Errorf("the write in flight: %+v", r)
		}
		s.must(<-closed, "close")
		if n := s.rows(); n != 1 {
			t.Errorf("%d rows when close returned", n)
		}
		if r := s.call("set", 3, "k", "late"); r.status != 409 || r.fenced != "true" {
			t.Errorf("a write behind the close: %+v", r)
		}
	})
}
