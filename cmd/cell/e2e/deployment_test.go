// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/internal/freeport"
)

// routerProcess is one replica of the router in front of deployments.
type routerProcess struct {
	cmd  *exec.Cmd
	url  string
	logs *syncBuffer
}

type syncBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func startRouter(t *testing.T, dir, name, upstream string) *routerProcess {
	t.Helper()
	addr, err := freeport.Addr()
	if err != nil {
		t.Fatal(err)
	}
	p := &routerProcess{url: "http://" + addr, logs: &syncBuffer{}}
	p.cmd = exec.Command(filepath.Join(bin, "cell"), "router", "deployment", "--listen", addr, "--admin-listen", "-", "--shared-host", "app.example.com",
		"--upstream", upstream, "--directory", "file:"+filepath.Join(dir, "cells.yaml"), "--directory-cache", "0.02",
		"--snapshots", filepath.Join(dir, "shared"), "--snapshot-key-file", filepath.Join(dir, "key"), "--name", name)
	p.cmd.Stderr = p.logs
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		if t.Failed() {
			t.Logf("%s:\n%s", name, p.logs)
		}
	})
	eventually(t, name+" listens", func() bool { return p.ask(t, "GET", "/livez", "x", "") == "200 ok" })
	return p
}

// routerClient keeps a connection for each of the clients.
var routerClient = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16}}

// ask returns the status and the body.
func (p *routerProcess) ask(t *testing.T, method, path, host, token string) string {
	r, err := http.NewRequestWithContext(t.Context(), method, p.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = host
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := routerClient.Do(r)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	if code := resp.Header.Get("Cell-Answer"); code != "" {
		return fmt.Sprint(resp.StatusCode, " ", code)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprint(resp.StatusCode, " ", strings.TrimSpace(string(b)))
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("waited in vain: " + what)
		}
	}
}

// Two replicas in front of one deployment, which becomes the first cell while its
// clients go on; a second cell; the directory is lost; replicas start without it.
func TestDeploymentRouters(t *testing.T) {
	dir := t.TempDir()
	deployment := func(name string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, name) }))
		t.Cleanup(s.Close)
		return s.URL
	}
	a, b := deployment("a"), deployment("b")
	write := func(name, text string) {
		t.Helper()
		tmp := filepath.Join(dir, name+".new")
		if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	write("key", strings.Repeat("0123456789abcdef", 4))
	write("cells.yaml", "cells: []\n")
	one, two := startRouter(t, dir, "r1", a), startRouter(t, dir, "r2", a)
	both := []*routerProcess{one, two}
	for _, p := range both {
		eventually(t, "a router is ready", func() bool { return p.ask(t, "GET", "/readyz", "x", "") == "200 ok" })
	}

	// The clients of the first deployment, from before the first cell to the end.
	seg := base64.RawURLEncoding.EncodeToString
	token := func(iss string) string {
		return seg([]byte(`{"alg":"none"}`)) + "." + seg(fmt.Appendf(nil, `{"iss":%q}`, iss)) + "."
	}
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	var asked, failed atomic.Int64
	for i, p := range both {
		for _, tok := range []string{"", token("iss-a"), "opaque"} {
			clients.Go(func() {
				for ctx.Err() == nil {
					asked.Add(1)
					if got := p.ask(t, []string{"GET", "POST"}[i], "/v1/x", "app.example.com", tok); got != "200 a" && ctx.Err() == nil {
						failed.Add(1)
						t.Errorf("a client of the first deployment got %s", got)
						return
					}
					select {
					case <-ctx.Done():
					case <-time.After(2 * time.Millisecond):
					}
				}
			})
		}
	}
	defer func() {
		stop()
		clients.Wait()
		if asked.Load() < 100 || failed.Load() > 0 {
			t.Errorf("%d of %d requests failed", failed.Load(), asked.Load())
		}
	}()
	expect := func(what string, p *routerProcess, path, host, tok, want string) {
		t.Helper()
		var got string
		eventually(t, fmt.Sprintf("%s: %s %s", what, host, path), func() bool {
			got = p.ask(t, "GET", path, host, tok)
			return got == want
		})
	}
	row := func(name, host, up, state, issuer string, first bool) string {
		return fmt.Sprintf("  - {name: %s, host: %s, upstream: %q, state: %s, issuers: [%s], first: %t}\n", name, host, up, state, issuer, first)
	}
	all := func(what, unknown, byIssuer, ofB string) {
		t.Helper()
		for _, p := range both {
			expect(what, p, "/", "b.example.com", "", ofB)
			expect(what, p, "/mcp", "app.example.com", token("iss-b"), byIssuer)
			expect(what, p, "/mcp", "app.example.com", token("nobody"), unknown)
			expect(what, p, "/", "elsewhere.example.com", "", "421 UNKNOWN_HOST")
			expect(what, p, "/cells/v1/placements", "app.example.com", "", "404 NOT_SERVED")
		}
	}
	all("nothing registered", "200 a", "200 a", "421 UNKNOWN_HOST")
	write("cells.yaml", "cells:\n"+row("a", "app.example.com", a, "attaching", "iss-a", true))
	all("the first attaches", "200 a", "200 a", "421 UNKNOWN_HOST")
	write("cells.yaml", "cells:\n"+row("a", "app.example.com", a, "serving", "iss-a", true))
	all("the first serves", "401 UNKNOWN_ISSUER", "401 UNKNOWN_ISSUER", "421 UNKNOWN_HOST")
	write("cells.yaml", "cells:\n"+row("a", "app.example.com", a, "serving", "iss-a", true)+row("b", "b.example.com", b, "serving", "iss-b", false))
	all("a second one serves", "401 UNKNOWN_ISSUER", "200 b", "200 b")

	for _, name := range []string{"r1", "r2"} {
		eventually(t, "the snapshot of "+name, func() bool {
			text, err := os.ReadFile(filepath.Join(dir, "shared", name+".cells"))
			return err == nil && strings.Contains(string(text), "b.example.com")
		})
	}
	if err := os.Remove(filepath.Join(dir, "cells.yaml")); err != nil {
		t.Fatal(err)
	}
	for _, p := range both {
		eventually(t, "the outage is told", func() bool { return strings.Contains(p.logs.String(), "cannot be read") })
	}
	all("the directory is lost", "401 UNKNOWN_ISSUER", "200 b", "200 b")
	both = append(both, startRouter(t, dir, "r3", a))
	all("a replica starts without a directory", "401 UNKNOWN_ISSUER", "200 b", "200 b")
	// An empty directory is not that of these cells.
	write("cells.yaml", "cells: []\n")
	for _, p := range both {
		eventually(t, "the other directory is told", func() bool { return strings.Contains(p.logs.String(), "another directory") })
	}
	all("an empty directory", "401 UNKNOWN_ISSUER", "200 b", "200 b")

	// A replica ends as it is told to.
	last := both[2]
	if err := last.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := last.cmd.Wait(); err != nil {
		t.Errorf("the end: %v", err)
	}
}
