// SPDX-License-Identifier: Apache-2.0

package process_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/directory/provision/process"
	"github.com/cloister-dev/cloister/directory/provision/provisiontest"
	"github.com/cloister-dev/cloister/internal/files"
	"github.com/cloister-dev/cloister/internal/supervise"
)

// TestMain is the service, too: a process that says in a file that it lives, and is
// ready while it answers.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "serve" {
		os.Exit(serve(os.Args[2], os.Args[3]))
	}
	goleak.VerifyTestMain(m)
}

func serve(listen, register string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	l, err := net.Listen("tcp", listen)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
	go func() { _ = srv.Serve(l) }()
	b, _ := json.Marshal(provision.Live{Cell: cells.CellID(os.Getenv("CELL_ID")), Instance: fmt.Sprint(os.Getpid()), PID: os.Getpid(),
		Version: os.Getenv("CELL_VERSION"), ServiceURL: os.Getenv("CELL_SERVICE_URL"), Ready: os.Getenv("UNREADY") == ""})
	path := filepath.Join(register, fmt.Sprintf("%d.json", os.Getpid()))
	if err := files.Write(path, b, 0o600); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	<-ctx.Done()
	_ = os.Remove(path) // it leaves before it stops to listen
	_ = srv.Shutdown(context.Background())
	return 0
}

// layout is a fleet's folder.
type layout struct{ dir string }

func (l layout) PKI() string                 { return filepath.Join(l.dir, "pki") }
func (l layout) Certs(n string) string       { return filepath.Join(l.dir, "certs", n) }
func (l layout) Cell(n string) string        { return filepath.Join(l.dir, "cells", n) }
func (l layout) Postgres(n string) string    { return filepath.Join(l.dir, "postgres", n) }
func (l layout) PassFile(n string) string    { return filepath.Join(l.Cell(n), "pgpass") }
func (l layout) AdmissionKey() string        { return filepath.Join(l.dir, "admission.key") }
func (l layout) CellKey(n string) string     { return filepath.Join(l.Cell(n), "admission.key") }
func (l layout) Secret(n, key string) string { return filepath.Join(l.dir, "secrets", n, key) }
func (l layout) Retired(n string, g int64) string {
	return filepath.Join(l.dir, "retired", fmt.Sprintf("%s-%d", n, g))
}

// machine is what outlives a provisioner.
type machine struct {
	layout
	t        provisiontest.TB
	register string
	procs    *supervise.Group
	p        *process.Provisioner
}

func newMachine(t provisiontest.TB) *machine {
	dir := t.TempDir()
	m := &machine{layout: layout{dir}, t: t, register: filepath.Join(dir, "register")}
	if err := errors.Join(os.MkdirAll(m.register, 0o700), files.Write(m.AdmissionKey(), []byte(strings.Repeat("ab", 32)), 0o600)); err != nil {
		t.Fatalf("%v", err)
	}
	if _, err := pki.NewAuthority(m.PKI(), "test", pki.Options{}); err != nil {
		t.Fatalf("%v", err)
	}
	m.open()
	t.Cleanup(func() { m.procs.Close(); m.p.Close() })
	return m
}

func (m *machine) open() {
	var err error
	if m.procs, err = supervise.New(filepath.Join(m.dir, "logs"), discard); err != nil {
		m.t.Fatalf("%v", err)
	}
	m.p = process.New(process.Config{Fleet: "test", Layout: m.layout, Procs: m.procs, Living: m.living, Engine: provision.EngineSQLite,
		Directory: func(cells.CellID) string { return "https://127.0.0.1:1" }, ReadyWithin: 20 * time.Second})
}

// reopen ends everything as a killed provisioner does, whose children go with it.
func (m *machine) reopen() provision.Provisioner {
	for _, name := range m.procs.Names() {
		if p := m.procs.Proc(name); p != nil {
			_ = p.Signal(syscall.SIGKILL)
		}
	}
	m.procs.Close()
	m.p.Close()
	m.open()
	return m.p
}

func (m *machine) living(_ context.Context, cell cells.CellID) ([]provision.Live, error) {
	names, err := filepath.Glob(filepath.Join(m.register, "*.json"))
	if err != nil {
		return nil, err
	}
	var out []provision.Live
	for _, n := range names {
		var l provision.Live
		if b, err := os.ReadFile(n); err != nil || json.Unmarshal(b, &l) != nil {
			continue
		}
		if l.Cell == cell && syscall.Kill(l.PID, 0) == nil {
			out = append(out, l)
		}
	}
	return out, nil
}

// left names processes, by their ids, and files.
func (m *machine) left(cell cells.CellID) []string {
	var out []string
	living, _ := m.living(context.Background(), cell)
	for _, l := range living {
		out = append(out, fmt.Sprintf("process %d of %s", l.PID, l.Version))
	}
	for _, p := range []string{m.Cell(string(cell)), m.Certs(string(cell)), m.Postgres(string(cell))} {
		if _, err := os.Lstat(p); err == nil {
			out = append(out, p)
		}
	}
	slices.Sort(out)
	return out
}

func (m *machine) spec(cell cells.CellID) provision.Spec {
	self, err := os.Executable()
	if err != nil {
		m.t.Fatalf("%v", err)
	}
	return provision.Spec{Cell: cell, Version: "v1", Command: []string{self, "serve", "{listen}", m.register}, Replicas: 2, Generation: 1,
		Desired: provision.DesiredServing, Store: provision.StoreSpec{Engine: provision.EngineSQLite}}
}

func harness(t provisiontest.TB) provisiontest.Harness {
	m := newMachine(t)
	return provisiontest.Harness{Provisioner: m.p, Reopen: m.reopen, Spec: m.spec, Left: m.left,
		Broken: func(s *provision.Spec) { s.Command = []string{s.Command[0], "serve", "not an address", m.register} }}
}

func TestSuite(t *testing.T)   { provisiontest.Run(t, harness) }
func TestMutants(t *testing.T) { provisiontest.Mutants(t, harness) }

// A process that is never ready, and does not end either, is given up in bounded time.
func TestNeverReady(t *testing.T) {
	m := newMachine(t)
	s := m.spec("c1")
	if err := m.p.Provision(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	s.Generation, s.Version, s.Env = 2, "v2", map[string]string{"UNREADY": "1"}
	if err := m.p.Upgrade(ctx, s); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "c1-3") {
		t.Errorf("%v, want one that names the process", err)
	}
	if st, err := m.p.Status(t.Context(), "c1"); err != nil || st.Ready != 2 {
		t.Errorf("%+v, %v", st, err)
	}
}

// What is secret is read from a file, at the start of each process, and is in no spec.
func TestSecrets(t *testing.T) {
	m := newMachine(t)
	s := m.spec("c1")
	s.Replicas, s.Secrets = 1, map[string]provision.SecretRef{"TOKEN": {Name: "api", Key: "token"}}
	if err := m.p.Provision(t.Context(), s); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "api") {
		t.Errorf("a secret that is not there: %v", err)
	}
	if err := files.Write(m.Secret("api", "token"), []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.p.Provision(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", m.procs.Proc("c1-1").PID()))
	if err != nil || !strings.Contains(string(env), "TOKEN=s3cret\x00") {
		t.Errorf("%v: the process does not have its secret", err)
	}
}

// A store that nobody could look into is put aside.
func TestKeepStore(t *testing.T) {
	m := newMachine(t)
	s := m.spec("c1")
	if err := m.p.Provision(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if err := files.Write(filepath.Join(m.Cell("c1"), "store.db"), []byte("rows"), 0o600); err != nil {
		t.Fatal(err)
	}
	cert := filepath.Join(m.Certs("c1"), "cell-c1.crt")
	info, err := pki.Inspect(cert, "", "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	s.Generation, s.Desired, s.KeepStore = 2, provision.DesiredRetired, true
	for range 2 {
		if err := m.p.Retire(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	if left := m.left("c1"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	kept := filepath.Join(m.Retired("c1", 2), "cell")
	if b, err := os.ReadFile(filepath.Join(kept, "store.db")); err != nil || string(b) != "rows" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := os.Lstat(filepath.Join(kept, "admission.key")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the key was put aside with it: %v", err)
	}
	b, err := os.ReadFile(filepath.Join(m.PKI(), pki.RevokedFile))
	if err != nil || !strings.Contains(string(b), info.Serial) {
		t.Errorf("%v: the certificate %s is not revoked:\n%s", err, info.Serial, b)
	}
}

func TestImagesAreNoPrograms(t *testing.T) {
	m := newMachine(t)
	s := m.spec("c1")
	s.Command, s.Image = nil, "registry.example/memory:v1"
	if err := m.p.Provision(t.Context(), s); !errors.Is(err, provision.ErrUnsupported) || !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("%v, want ErrUnsupported", err)
	}
}
