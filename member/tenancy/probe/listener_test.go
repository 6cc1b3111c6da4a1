// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
)

func get(h http.Handler, method, target, host string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, nil)
	r.Host = host
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// The service's own port says the id to everybody, and nothing else.
func TestIDHandler(t *testing.T) {
	next := 0
	h := IDHandler(deployment, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { next++; w.WriteHeader(http.StatusTeapot) }))
	for _, host := range []string{"cell.example", "other.example:99", "[::1]", "", "a\"b"} {
		for range 500 { // no limit
			if w := get(h, http.MethodGet, Path, host); w.Code != http.StatusOK || w.Body.String() != `{"deployment_id":"`+string(deployment)+`"}` {
				t.Fatalf("host %q: %d %s", host, w.Code, w.Body)
			}
		}
	}
	if next != 0 {
		t.Errorf("%d requests went on", next)
	}
	for _, path := range []string{"/", Path + "/", "/v1/health", Path + "/x"} {
		if w := get(h, http.MethodGet, path, "h"); w.Code != http.StatusTeapot {
			t.Errorf("%s: %d", path, w.Code)
		}
	}
	if w := get(h, http.MethodPost, Path, "h"); w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") != "GET" {
		t.Errorf("POST: %d", w.Code)
	}
}

// Every answer is what the stores hold then.
func TestListenerReadsEachTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pg, s3, set := fakes(t)
		h := newHandler(Config{Stores: set, Deployment: deployment, Logger: quiet})
		for i := range 5 {
			pg.set(func() { pg.nonce = stores.NewNonce() })
			if i == 3 {
				s3.set(func() { s3.nonce = "" })
			}
			w := get(h, http.MethodGet, Path, "any")
			var a Answer
			if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil || w.Code != http.StatusOK {
				t.Fatalf("%d %s %v", w.Code, w.Body, err)
			}
			nonces := map[stores.Kind]stores.Nonce{stores.Postgres: pg.nonce}
			if s3.nonce != "" {
				nonces[stores.S3] = s3.nonce
			}
			if want := (Answer{Deployment: deployment, Bucket: "bucket", Prefix: "env/a", Stores: []stores.Kind{stores.Postgres, stores.S3}, Nonces: nonces}); !reflect.DeepEqual(a, want) {
				t.Errorf("%+v, want %+v", a, want)
			}
			if w.Header().Get("Cache-Control") != "no-store" {
				t.Error("the answer may be kept")
			}
			if pg.reads != 2*(i+1) || s3.reads != 2*(i+1) {
				t.Errorf("after %d answers the stores were read %d and %d times", i+1, pg.reads, s3.reads)
			}
			pass(time.Second / Rate)
		}
	})
}

// A store that cannot be read, or is another deployment's, leaves no answer.
func TestListenerIsWholeOrNothing(t *testing.T) {
	for name, edit := range map[string]func(pg, s3 *fake){
		"one is away":            func(_, s3 *fake) { s3.err = fmt.Errorf("%w: password hunter2", cells.ErrUnavailable) },
		"the authority is away":  func(pg, _ *fake) { pg.err = cells.ErrUnavailable },
		"garbled":                func(pg, _ *fake) { pg.err = cells.ErrInvalid },
		"one is another's":       func(_, s3 *fake) { s3.id = stores.NewDeploymentID() },
		"one carries none":       func(_, s3 *fake) { s3.id = "" },
		"all are another's":      func(pg, s3 *fake) { pg.id = stores.NewDeploymentID(); s3.id = pg.id },
		"the authority has none": func(pg, s3 *fake) { pg.id, s3.id = "", "" },
	} {
		pg, s3, set := fakes(t)
		edit(pg, s3)
		w := get(newHandler(Config{Stores: set, Deployment: deployment, Logger: quiet}), http.MethodGet, Path, "h")
		body := w.Body.String()
		if w.Code != http.StatusServiceUnavailable || w.Header().Get(cells.HeaderAnswer) != string(cells.CodeBackendUnavailable) ||
			strings.Contains(body, "hunter2") || strings.Contains(body, string(deployment)) || strings.Contains(body, "nonces") {
			t.Errorf("%s: %d %s", name, w.Code, body)
		}
	}
}

// Past the rate of the process the answer is 429, whatever is asked for, and the
// stores are left alone; a flood on the service's own port does not count.
func TestListenerRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pg, _, set := fakes(t)
		h := newHandler(Config{Stores: set, Deployment: deployment, Logger: quiet})
		own := IDHandler(deployment, http.NotFoundHandler())
		for range 10_000 {
			get(own, http.MethodGet, Path, "h")
		}
		for i := range Burst {
			if w := get(h, http.MethodGet, Path, "h"); w.Code != http.StatusOK {
				t.Fatalf("request %d: %d", i, w.Code)
			}
		}
		reads := pg.reads
		for _, path := range []string{Path, "/other", Path} {
			w := get(h, http.MethodGet, path, "h")
			if w.Code != http.StatusTooManyRequests || w.Header().Get(cells.HeaderAnswer) != string(cells.CodeRateLimited) || w.Header().Get("Retry-After") != "1" {
				t.Errorf("%s past the rate: %d %v", path, w.Code, w.Header())
			}
		}
		if pg.reads != reads {
			t.Error("a refused request read a store")
		}
		pass(time.Second)
		for i := range Rate + 1 {
			w := get(h, http.MethodGet, Path, "h")
			if want := map[bool]int{true: 200, false: 429}[i < Rate]; w.Code != want {
				t.Errorf("a second later, request %d: %d, want %d", i, w.Code, want)
			}
		}
		pass(time.Second)
		if w := get(h, http.MethodGet, "/metrics", "h"); w.Code != http.StatusNotFound || w.Header().Get(cells.HeaderAnswer) != string(cells.CodeNotServed) {
			t.Errorf("another path: %d", w.Code)
		}
		if w := get(h, http.MethodDelete, Path, "h"); w.Code != http.StatusMethodNotAllowed {
			t.Errorf("DELETE: %d", w.Code)
		}
	})
}

func TestStart(t *testing.T) {
	defer goleak.VerifyNone(t)
	_, s3, set := fakes(t)
	odd, err := stores.NewSet(s3)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]Config{
		"no stores":             {Port: 1, Deployment: deployment},
		"not Postgres":          {Port: 1, Stores: odd, Deployment: deployment},
		"no port":               {Stores: set, Deployment: deployment},
		"a port that is none":   {Port: 65536, Stores: set, Deployment: deployment},
		"no id":                 {Port: 1, Stores: set},
		"no id, but a listener": {Listener: ln, Stores: set},
	} {
		if l, err := Start(cfg); l != nil || !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	l, err := Start(Config{Listener: ln, Stores: set, Deployment: deployment, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Start(Config{Port: ln.Addr().(*net.TCPAddr).Port, Stores: set, Deployment: deployment, Logger: quiet}); err == nil {
		t.Error("two listeners on one port")
	}
	for range 2 {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
		_ = c.Close()
		t.Error("it listens after Close")
	}
}

// A port without an address is every address of the host.
func TestStartBindsEveryAddress(t *testing.T) {
	_, _, set := fakes(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0") // a port that is free
	if err != nil {
		t.Fatal(err)
	}
	port := ln.Addr().(*net.TCPAddr).Port
	_ = ln.Close()
	l, err := Start(Config{Port: port, Stores: set, Deployment: deployment, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a := l.Addr().(*net.TCPAddr); !a.IP.IsUnspecified() || a.Port != port {
		t.Errorf("listens at %v", a)
	}
}

func TestPortFromEnv(t *testing.T) {
	for in, want := range map[string]int{"": 0, "0": 0, "1": 1, "65535": 65535} {
		t.Setenv("CELL_PROBE_PORT", in)
		if got, err := PortFromEnv(); err != nil || got != want {
			t.Errorf("%q: %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"-1", "65536", "x", "80 ", "0x50", ":80"} {
		t.Setenv("CELL_PROBE_PORT", in)
		if got, err := PortFromEnv(); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %d, %v", in, got, err)
		}
	}
}
