// SPDX-License-Identifier: Apache-2.0

package idp_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy/login"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/services/idp"
	"github.com/cloister-dev/cloister/services/idp/idptest"
)

// place is a host: a router's lookup, and where people sign in.
type place struct {
	*httptest.Server
	// lookup answers a lookup; nil is a deployment without a router.
	lookup         http.HandlerFunc
	lookups, asked atomic.Int64
}

func newPlace(t *testing.T, p *idptest.Provider, lookup http.HandlerFunc) *place {
	at := &place{lookup: lookup}
	h, err := signin.MetadataHandler("https://whatever.example", p.URL, p.Client)
	if err != nil {
		t.Fatal(err)
	}
	at.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == signin.PathMetadata:
			at.asked.Add(1)
			h.ServeHTTP(w, r)
		case r.URL.Path == wire.PathLookup && at.lookup != nil:
			at.lookups.Add(1)
			if r.URL.Query().Get("tenant") != "acme" || r.Header.Get("Authorization") != "" {
				t.Errorf("asked for %s", r.URL)
			}
			at.lookup(w, r)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(at.Close)
	return at
}

// The command, as a person uses it: it says where to sign in, waits, keeps the token and
// prints none.
func TestLoginCommand(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "cell")
	if out, err := exec.Command("go", "build", "-o", bin, "github.com/cloister-dev/cloister/cmd/cell").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	p := idptest.Start(t, "cell-one", idp.User{Name: "ann", Password: "pw", Email: "ann@example.com", Verified: true, Tenant: "acme"})
	at := newPlace(t, p, answers(&cells.Answer{Code: cells.CodeNoCell}))
	v, err := signin.New(signin.Config{Issuers: signin.Issuers{{Issuer: p.URL, Audience: p.Client}}})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	address, code := regexp.MustCompile(`(?m)^(?:Sign in at|Open) (\S+)$`), regexp.MustCompile(`(?m)^and enter the code (\S+)$`)
	for _, device := range []bool{false, true} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		config := t.TempDir()
		args := []string{"login", "--host", at.URL, "--tenant", "acme", "--no-browser", "--json"}
		if device {
			args = append(args, "--device")
		}
		cmd := exec.CommandContext(ctx, bin, args...)
		cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+config)
		var out bytes.Buffer
		cmd.Stdout = &out
		said, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var told strings.Builder
		for lines := bufio.NewScanner(said); lines.Scan(); {
			told.WriteString(lines.Text() + "\n")
			to := address.FindStringSubmatch(told.String())
			if to == nil || device && !code.MatchString(told.String()) {
				continue
			}
			if device {
				p.Approve(to[1], "ann")
			} else {
				resp, err := http.Get(p.Browse(to[1], "ann").String())
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
			}
			break
		}
		rest, _ := io.ReadAll(said)
		told.Write(rest)
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%v\n%s", err, told.String())
		}
		var printed struct {
			login.Token
			File string `json:"file"`
		}
		if err := json.Unmarshal(out.Bytes(), &printed); err != nil || printed.Email != "ann@example.com" || printed.Access != "" || printed.Refresh != "" {
			t.Fatalf("%v: %s", err, out.String())
		}
		info, err := os.Stat(printed.File)
		if err != nil || info.Mode().Perm() != 0o600 || !strings.HasPrefix(printed.File, config) {
			t.Fatalf("the file %s: %v, %v", printed.File, info, err)
		}
		b, err := os.ReadFile(printed.File)
		if err != nil {
			t.Fatal(err)
		}
		var kept login.Token
		if err := json.Unmarshal(b, &kept); err != nil {
			t.Fatal(err)
		}
		if got, err := v.Verify(ctx, kept.Access); err != nil || got.Tenant != "acme" {
			t.Errorf("the cell makes of the kept token %+v, %v", got, err)
		}
		if all := out.String() + told.String(); strings.Contains(all, kept.Access) || strings.Contains(all, kept.Refresh) {
			t.Error("a token was printed")
		}
	}
}

func answers(a *cells.Answer) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { cells.WriteProblem(w, r, a) }
}

func TestLogin(t *testing.T) {
	ann := idp.User{Name: "ann", Password: "pw", Email: "ann@example.com", Verified: true, Tenant: "acme"}
	first, second := idptest.Start(t, "cell-one", ann), idptest.Start(t, "cell-two", ann)
	shared, two := newPlace(t, first, nil), newPlace(t, second, nil)
	toTwo := func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(wire.Lookup{Tenant: "acme", Cell: "two", Host: "two.example.com"})
	}
	// run signs in and checks the token at both cells' verifiers.
	run := func(p *idptest.Provider, change func(*login.Config)) (login.Token, error) {
		t.Helper()
		cfg := login.Config{Host: shared.URL, Tenant: "acme", Wait: -1,
			At: func(host string) string {
				if host != "two.example.com" {
					t.Errorf("asked at %s", host)
				}
				return two.URL
			},
			Show: func(address, code string) {
				if code != "" {
					p.Approve(address, "ann")
					return
				}
				back := p.Browse(address, "ann")
				wrong := *back
				q := wrong.Query()
				q.Set("state", "another")
				wrong.RawQuery = q.Encode()
				for _, c := range []struct {
					at   string
					want int
				}{{wrong.String(), 404}, {back.String(), 200}} {
					resp, err := http.Get(c.at)
					if err != nil {
						t.Error(err)
						return
					}
					resp.Body.Close()
					if resp.StatusCode != c.want {
						t.Errorf("the callback answers %d, want %d", resp.StatusCode, c.want)
					}
				}
			}}
		if change != nil {
			change(&cfg)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		return login.Run(ctx, cfg)
	}
	good := func(what string, p *idptest.Provider, host string, tok login.Token, err error) {
		t.Helper()
		if err != nil || tok.Issuer != p.URL || tok.Host != host || tok.Email != "ann@example.com" || tok.Refresh == "" || tok.Access == "" {
			t.Fatalf("%s: %+v, %v", what, tok, err)
		}
		v, err := signin.New(signin.Config{Issuers: signin.Issuers{{Issuer: p.URL, Audience: p.Client}}})
		if err != nil {
			t.Fatal(err)
		}
		defer v.Close()
		if got, err := v.Verify(t.Context(), tok.Access); err != nil || got.Tenant != "acme" || got.Email != "ann@example.com" {
			t.Errorf("%s: the cell makes of it %+v, %v", what, got, err)
		}
	}

	shared.lookup = toTwo
	tok, err := run(second, nil)
	good("a tenant of the second cell", second, "http://two.example.com", tok, err)
	if shared.asked.Load() != 0 {
		t.Error("a sign-in for the second cell asked the first where to sign in")
	}
	tok, err = run(second, func(c *login.Config) { c.Device = true })
	good("by the device flow", second, "http://two.example.com", tok, err)

	shared.lookup = answers(&cells.Answer{Code: cells.CodeNoCell})
	tok, err = run(first, nil)
	good("before there are cells", first, shared.URL, tok, err)
	shared.lookup = nil
	tok, err = run(first, nil)
	good("without a router", first, shared.URL, tok, err)
	if tok.Cell != "" {
		t.Errorf("a cell's name from nobody: %s", tok.Cell)
	}

	// Busy, and then not; busy for longer than is waited.
	busy := answers(&cells.Answer{Code: cells.CodeRateLimited, RetryAfter: time.Second})
	var told atomic.Int64
	shared.lookups.Store(0)
	shared.lookup = func(w http.ResponseWriter, r *http.Request) {
		if shared.lookups.Load() == 1 {
			busy(w, r)
			return
		}
		toTwo(w, r)
	}
	tok, err = run(second, func(c *login.Config) { c.Wait, c.Tell = time.Minute, func(string) { told.Add(1) } })
	good("after a refusal for the pace", second, "http://two.example.com", tok, err)
	if told.Load() != 1 || shared.lookups.Load() != 2 {
		t.Errorf("told %d times, looked up %d times", told.Load(), shared.lookups.Load())
	}

	// No flow begins at a cell that may not hold the tenant.
	refuse := func(what string, code cells.Code, lookup http.HandlerFunc) {
		t.Helper()
		shared.lookup = lookup
		before := shared.asked.Load() + two.asked.Load()
		_, err := run(first, func(c *login.Config) { c.Show = func(string, string) { t.Errorf("%s: a flow begins", what) } })
		if a := cells.AnswerOf(err); err == nil || code != "" && (a == nil || a.Code != code) || !strings.Contains(err.Error(), shared.URL) {
			t.Errorf("%s: %v", what, err)
		}
		if shared.asked.Load()+two.asked.Load() != before {
			t.Errorf("%s: it was asked where to sign in", what)
		}
	}
	refuse("busy", cells.CodeRateLimited, busy)
	refuse("the directory is down", "", answers(&cells.Answer{Code: cells.CodeBackendUnavailable, RetryAfter: time.Second}))
	refuse("forbidden", "", answers(&cells.Answer{Code: cells.CodeForbidden}))
	refuse("a redirect", "", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, two.URL, http.StatusFound) })
	refuse("no answer of a router", "", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"cell":"two"}`)) })
	refuse("no JSON", "", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`<html>`)) })

	// The context ends while nobody signs in.
	shared.lookup = toTwo
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	_, err = login.Run(ctx, login.Config{Host: shared.URL, Tenant: "acme", Show: func(string, string) { cancel(gone) }, At: func(string) string { return two.URL }})
	if !errors.Is(err, gone) {
		t.Errorf("given up: %v", err)
	}
	for _, bad := range []login.Config{{Host: "http://example.com"}, {Host: "https://u@example.com"}, {Host: "https://example.com/x"}, {Host: ""}, {Host: shared.URL, Tenant: "a b"}} {
		bad.Show = func(string, string) {}
		if _, err := login.Run(t.Context(), bad); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v", bad.Host, err)
		}
	}
}
