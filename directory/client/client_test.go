// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func dial(t *testing.T, url string) *client.Client {
	t.Helper()
	c, err := client.New(url, "lco_secret")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

func serve(t *testing.T, h http.HandlerFunc) (*client.Client, *httptest.Server) {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return dial(t, s.URL), s
}

func TestAddresses(t *testing.T) {
	for _, good := range []string{"https://directory.example", "https://10.0.0.1:7400/", "http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"} {
		if _, err := client.New(good, "lco_x"); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for _, bad := range []string{"http://directory.example", "http://10.0.0.1:1", "https://u:p@h", "https://h/cells", "https://h?x=1", "ftp://h", "h", "", "http://localhost.evil.example", "http://127.0.0.1.evil.example"} {
		_, err := client.New(bad, "lco_secret")
		if !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), "lco_secret") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	for _, bad := range []string{"", "lco_a b", "lco_a\n"} {
		if _, err := client.New("https://h", bad); !errors.Is(err, cells.ErrInvalid) || len(bad) > 0 && strings.Contains(err.Error(), bad) {
			t.Errorf("credential %q: %v", bad, err)
		}
	}
}

// What a caller is told when something goes wrong: whether its change may have
// been made.
func TestOutcomes(t *testing.T) {
	place := func(c *client.Client) error {
		_, err := c.Place(t.Context(), api.PlacementRequest{Tenant: "t", OperationID: "op-9"})
		return err
	}
	list := func(c *client.Client) error {
		_, err := c.Cells(t.Context())
		return err
	}
	problem := func(code cells.Code) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { cells.WriteProblem(w, r, &cells.Answer{Code: code}) }
	}
	drop := func(w http.ResponseWriter, r *http.Request) {
		_, _ = bufio.NewReader(r.Body).ReadByte()
		panic(http.ErrAbortHandler)
	}
	half := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", api.ContentJSON)
		w.Header().Set(api.HeaderRequestID, "r")
		w.Header().Set("Content-Length", "1000")
		_, _ = w.Write([]byte(`{"tenant":"t"`))
	}
	page := func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"tenant":"t"}`)) }
	gateway := func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "bad gateway", http.StatusBadGateway) }
	elsewhere := func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/other", http.StatusTemporaryRedirect)
	}
	for name, c := range map[string]struct {
		h       http.HandlerFunc
		unknown bool
		code    cells.Code
	}{
		"refused":      {problem(cells.CodeConflict), false, cells.CodeConflict},
		"bad request":  {problem(cells.CodeBadRequest), false, cells.CodeBadRequest},
		"store down":   {problem(cells.CodeBackendUnavailable), true, cells.CodeBackendUnavailable},
		"dropped":      {drop, true, ""},
		"half":         {half, true, ""},
		"another page": {page, true, ""},
		"gateway":      {gateway, true, ""},
		"redirect":     {elsewhere, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int64
			cl, _ := serve(t, func(w http.ResponseWriter, r *http.Request) { calls.Add(1); c.h(w, r) })
			err := place(cl)
			var u *client.UnknownOutcomeError
			if errors.As(err, &u) != c.unknown || err == nil {
				t.Fatalf("a change: %v", err)
			}
			if c.unknown && (u.Operation != "op-9" || !strings.Contains(err.Error(), "may have been made")) {
				t.Errorf("unknown outcome %+v", u)
			}
			if a := cells.AnswerOf(err); c.code != "" && (a == nil || a.Code != c.code) || c.code == "" && a != nil {
				t.Errorf("answer %+v, want %s", a, c.code)
			}
			if n := calls.Load(); n != 1 {
				t.Errorf("the change was sent %d times", n)
			}
			err = list(cl)
			if errors.As(err, &u) || err == nil || strings.Contains(err.Error(), "lco_secret") {
				t.Errorf("a question: %v", err)
			}
		})
	}
	t.Run("never reached", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		url := "http://" + l.Addr().String()
		l.Close()
		err = place(dial(t, url))
		var u *client.UnknownOutcomeError
		if errors.As(err, &u) || !errors.Is(err, cells.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("context ends", func(t *testing.T) {
		release := make(chan struct{})
		cl, _ := serve(t, func(_ http.ResponseWriter, r *http.Request) { <-release })
		defer close(release)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := cl.Place(ctx, api.PlacementRequest{Tenant: "t"})
		var u *client.UnknownOutcomeError
		if !errors.As(err, &u) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("dry run", func(t *testing.T) {
		cl, _ := serve(t, gateway)
		_, err := cl.DryRun(t.Context(), api.MoveRequest{Tenant: "t", To: "b"})
		var u *client.UnknownOutcomeError
		if errors.As(err, &u) || err == nil {
			t.Errorf("got %v", err)
		}
	})
}

func TestWatchMoveComesBack(t *testing.T) {
	states := []api.MoveState{api.MovePreparing, api.MoveCutting, api.MoveDone}
	var calls atomic.Int64
	cl, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		n := int(calls.Add(1)) - 1
		if n == 1 { // a directory that restarts
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Content-Type", api.ContentNDJSON)
		w.Header().Set(api.HeaderRequestID, "r")
		fmt.Fprintf(w, "{\"alive\":true}\n{\"move\":{\"id\":\"m\",\"state\":%q}}\n", states[min(n, 2)])
	})
	var got []api.MoveState
	err := cl.WatchMove(t.Context(), "m", func(m api.Move) error { got = append(got, m.State); return nil })
	if err != nil || fmt.Sprint(got) != "[PREPARING DONE]" || calls.Load() != 3 {
		t.Errorf("saw %v in %d calls, %v", got, calls.Load(), err)
	}
	enough := errors.New("enough")
	calls.Store(0)
	if err := cl.WatchMove(t.Context(), "m", func(api.Move) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("the caller's error came back as %v", err)
	}
	if err := cl.WatchMove(t.Context(), "a/b", nil); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("bad id: %v", err)
	}
	gone, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeNotFound})
	})
	if a := cells.AnswerOf(gone.WatchMove(t.Context(), "m", nil)); a == nil || a.Code != cells.CodeNotFound {
		t.Errorf("unknown move: %v", a)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cl2, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", api.ContentNDJSON)
		w.Header().Set(api.HeaderRequestID, "r")
		_, _ = w.Write([]byte("{\"move\":{\"id\":\"m\",\"state\":\"PREPARING\"}}\n"))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	err = cl2.WatchMove(ctx, "m", func(api.Move) error { cancel(enough); return nil })
	if !errors.Is(err, enough) {
		t.Errorf("the context's end came back as %v", err)
	}
}
