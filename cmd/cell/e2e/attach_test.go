// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/internal/freeport"
	"github.com/cloister-dev/cloister/internal/pgcluster"
)

// deployments are services on Postgres behind a router of deployments, all of them
// processes.
type deployments struct {
	*testing.T
	dir, router, operator string
	// directory is the router's; "" for a file of its own.
	directory string
	pg        *pgcluster.Cluster
	sign      func(issuer, tenant string) string
	signAs    func(who, issuer, tenant string) string
}

// service is one deployment: its settings, and its process.
type service struct {
	*deployments
	name, host, addr, admin, probe, env string
	settings                            map[string]string
	token, sum                          string
	// memory is the program, and issuers the file of whom it accepts; "" for the usual.
	memory, issuers string
	cmd             *exec.Cmd
	ended           chan struct{}
}

func startDeployments(t *testing.T) *deployments {
	dir, err := os.MkdirTemp("", "cell-attach-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	d := &deployments{T: t, dir: dir}
	if d.pg, err = pgcluster.Start(t.Context(), pgcluster.Options{Dir: filepath.Join(dir, "pg"), NoSync: true}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.pg.Stop(); _ = os.RemoveAll(dir) })
	d.signAs = issuerOf(t, filepath.Join(dir, "keys.json"))
	d.sign = func(issuer, tenant string) string { return d.signAs("someone", issuer, tenant) }
	return d
}

// issuer writes an issuer's public key as a key set, and returns what signs tokens of
// one person.
func issuer(t *testing.T, path string) func(issuer, tenant string) string {
	t.Helper()
	sign := issuerOf(t, path)
	return func(issuer, tenant string) string { return sign("someone", issuer, tenant) }
}

// issuerOf is issuer for anybody.
func issuerOf(t *testing.T, path string) func(who, issuer, tenant string) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "k", Algorithm: "ES256"}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "k"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return func(who, issuer, tenant string) string {
		now := time.Now()
		s, err := jwt.Signed(signer).Claims(map[string]any{"iss": issuer, "sub": who, "email": who + "@example.com", "email_verified": true, "tenant": tenant, "iat": now.Unix(), "exp": now.Add(time.Hour).Unix()}).Serialize()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

func (d *deployments) json(name string, v any) string {
	d.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		d.Fatal(err)
	}
	path := filepath.Join(d.dir, name)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		d.Fatal(err)
	}
	return path
}

func (d *deployments) free() string {
	d.Helper()
	addr, err := freeport.Addr()
	if err != nil {
		d.Fatal(err)
	}
	return addr
}

// service makes a deployment's database and settings, with more of them in pairs; start
// starts its process.
func (d *deployments) service(name, host string, more ...string) *service {
	d.Helper()
	if err := d.pg.CreateDatabase(d.Context(), name); err != nil {
		d.Fatal(err)
	}
	s := &service{deployments: d, name: name, host: host, addr: d.free(), admin: d.free(), probe: d.free()}
	token, sum := credential.Router.New()
	s.token, s.sum = token, sum.String()
	d.json("issuers-"+name+".json", []map[string]any{{"issuer": "iss-" + name, "jwks": "keys.json"}})
	s.settings = map[string]string{"CELL": name, "CELL_PUBLIC_BASE_URL": "https://" + host, "CELL_TENANCY_MODE_CACHE_S": "0.2", "CELL_DSN": d.pg.URL(name)}
	for i := 0; i < len(more); i += 2 {
		s.settings[more[i]] = more[i+1]
	}
	cells := filepath.Join(d.dir, "cells")
	if err := os.MkdirAll(cells, 0o700); err != nil {
		d.Fatal(err)
	}
	s.env = filepath.Join(cells, name+".env")
	s.write()
	return s
}

// write writes the settings for commands. Processes have the issuers in a file; to a
// command they are a setting.
func (s *service) write() {
	s.Helper()
	var b strings.Builder
	for k, v := range s.settings {
		fmt.Fprintf(&b, "%s=%s\n", k, v)
	}
	fmt.Fprintf(&b, "CELL_BEARER_ISSUERS=iss-%s\n", s.name)
	if err := os.WriteFile(s.env, []byte(b.String()), 0o600); err != nil {
		s.Fatal(err)
	}
}

// start starts the process, as a cell's or alone. One whose first read of its rows is
// late on a busy machine ends, and is started again.
func (s *service) start(cell bool) {
	s.Helper()
	for range 5 {
		if s.try(cell) {
			return
		}
	}
	s.Fatal(s.name + " does not start")
}

func (s *service) try(cell bool) bool {
	s.Helper()
	args := []string{"--listen", s.addr, "--admin-listen", s.admin, "--store", "postgres", "--dsn", s.settings["CELL_DSN"]}
	program, issuers := s.memory, s.issuers
	if program == "" {
		program = filepath.Join(bin, "memory")
	}
	if issuers == "" {
		issuers = filepath.Join(s.dir, "issuers-"+s.name+".json")
	}
	if cell {
		args = append(args, "--issuers", issuers)
	}
	s.cmd = exec.Command(program, args...)
	s.cmd.Env = append(os.Environ(), "CELL_PROBE_PORT="+s.probe[strings.LastIndex(s.probe, ":")+1:])
	if cell {
		s.cmd.Env = append(s.cmd.Env, "CELL_ROUTER_URL="+s.router, "CELL_ROUTER_TOKEN="+s.token)
		for k, v := range s.settings {
			s.cmd.Env = append(s.cmd.Env, k+"="+v)
		}
	}
	logs := &syncBuffer{}
	s.cmd.Stderr = logs
	if err := s.cmd.Start(); err != nil {
		s.Fatal(err)
	}
	cmd, ended := s.cmd, make(chan struct{})
	s.ended = ended
	go func() { _ = cmd.Wait(); close(ended) }()
	s.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if s.Failed() {
			s.Logf("%s:\n%s", s.name, logs)
		}
	})
	listens := false
	eventually(s.T, s.name+" listens", func() bool {
		select {
		case <-ended:
			return true
		default:
		}
		resp, err := http.Get("http://" + s.addr + "/v1/health/deployment")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		listens = resp.StatusCode == http.StatusOK
		return listens
	})
	return listens
}

// beside is another process of the deployment, of the given program.
func (s *service) beside(memory string) *service {
	s.Helper()
	out := *s
	out.memory, out.addr, out.admin, out.probe = memory, s.free(), s.free(), s.free()
	return &out
}

func (s *service) stop() {
	s.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		s.Fatal(err)
	}
	<-s.ended
}

func (s *service) ready() bool {
	resp, err := http.Get("http://" + s.admin + "/readyz")
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// startRouter starts the router in front of the first deployment, on a directory of
// its own.
func (d *deployments) startRouter(first *service) {
	d.Helper()
	cred, sum := credential.Operator.New()
	d.operator = filepath.Join(d.dir, "operator")
	if err := os.WriteFile(d.operator, []byte(cred), 0o600); err != nil {
		d.Fatal(err)
	}
	addr := d.free()
	d.router = "http://" + addr
	directory := d.directory
	if directory == "" {
		directory = "sqlite:" + filepath.Join(d.dir, "directory.db")
	}
	cmd := exec.Command(filepath.Join(bin, "cell"), "router", "deployment", "--listen", addr, "--admin-listen", "-", "--shared-host", "app.example.com",
		"--upstream", "http://"+first.addr, "--upstream-probe", "http://"+first.probe, "--operator-sha256", sum.String(),
		"--directory", directory, "--allow-asynchronous", "--directory-cache", "0.02", "--name", "r1")
	logs := &syncBuffer{}
	cmd.Stderr = logs
	if err := cmd.Start(); err != nil {
		d.Fatal(err)
	}
	d.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if d.Failed() {
			d.Logf("router:\n%s", logs)
		}
	})
	eventually(d.T, "the router is ready", func() bool { return d.ask("GET", "/readyz", "x", "", "", "") == "200" })
}

// ask returns the status, and the code of the platform's own answers.
func (d *deployments) ask(method, path, host, token, tenant, body string) string {
	d.Helper()
	r, err := http.NewRequestWithContext(d.Context(), method, d.router+path, strings.NewReader(body))
	if err != nil {
		d.Fatal(err)
	}
	r.Host = host
	r.Header.Set("Content-Type", "application/json")
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	if tenant != "" {
		r.Header.Set("X-Tenant", tenant)
	}
	resp, err := routerClient.Do(r)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	if code := resp.Header.Get("Cell-Answer"); code != "" {
		return fmt.Sprint(resp.StatusCode, " ", code)
	}
	return fmt.Sprint(resp.StatusCode)
}

const setItem = `{"namespace":"n","key":"k","value":1}`

// bot makes a bot that may act in every tenant and returns what the directory keeps of it.
func (s *service) bot(name string) string {
	s.Helper()
	key := filepath.Join(s.dir, "bots", s.name+".jwk")
	if err := os.MkdirAll(filepath.Dir(key), 0o700); err != nil {
		s.Fatal(err)
	}
	if out, err := exec.Command(filepath.Join(bin, "cell"), "bot", "new-key", "--key-file", key).CombinedOutput(); err != nil {
		s.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.Command(filepath.Join(bin, "cell"), "bot", "create", name, "--public-key", key, "--platform-admin", "--env-file", s.env).Output()
	if err != nil {
		s.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// command is a cell command on a deployment.
func (s *service) command(args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(bin, "cell"), append(args, "--router", s.router, "--credential-file", s.operator, "--env-file", s.env)...)
	return cmd
}

func (s *service) run(args ...string) {
	s.Helper()
	if out, err := s.command(args...).CombinedOutput(); err != nil {
		s.Fatalf("cell %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func (s *service) refused(part string, args ...string) {
	s.Helper()
	out, err := s.command(args...).CombinedOutput()
	if err == nil || s.commandExit(err) != 3 || !bytes.Contains(out, []byte(part)) {
		s.Errorf("cell %s: %v, want a refusal with %q\n%s", strings.Join(args, " "), err, part, out)
	}
}

func (s *service) commandExit(err error) int {
	if x, ok := err.(*exec.ExitError); ok {
		return x.ExitCode()
	}
	return -1
}

// A service behind a router becomes the first cell while its clients go on, its attach
// is ended by SIGKILL at every step that it persists, and a second cell is attached.
func TestAttachDeployments(t *testing.T) {
	d := startDeployments(t)
	// Its people are provisioned by a token from before it was a cell.
	const scimToken = "an-older-scim-token"
	tokens := filepath.Join(d.dir, "scim-tokens")
	if err := os.WriteFile(tokens, []byte(scimToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	one := d.service("one", "app.example.com", "CELL_SCIM", "true", "CELL_SCIM_TOKENS_FILE", tokens)
	one.start(false)
	d.startRouter(one)
	if got := d.ask("POST", "/v1/memory.set", "app.example.com", "", "acme", setItem); got != "200" {
		t.Fatalf("before prepare: %s", got)
	}
	botOfOne := one.bot("each")
	one.run("prepare", "--host", "app.example.com", "--credential-sha256", one.sum, "--bot", botOfOne)
	if got := d.ask("POST", "/v1/memory.set", "app.example.com", "", "beta", setItem); got != "200" {
		t.Fatalf("between prepare and the roll-out: %s", got)
	}
	common := []string{"attach", "--allow-asynchronous", "--request-deadline", "100ms", "--alive", "3s", "--wait", "60s", "--bot"}
	attach := append(common[:len(common):len(common)], botOfOne)
	one.refused("CELL is not set", attach...)
	one.stop()
	one.start(true)
	eventually(t, "one is ready as a cell", one.ready)
	token := d.sign("iss-one", "acme")
	if got := d.ask("POST", "/v1/memory.set", "app.example.com", token, "", setItem); got != "200" {
		t.Fatalf("between the roll-out and attach: %s", got)
	}
	if got := d.ask("POST", "/v1/memory.set", "app.example.com", d.sign("iss-one", "fresh"), "", setItem); got != "200" {
		t.Fatalf("a new tenant, which is recorded: %s", got)
	}
	if got := d.ask("POST", "/v1/memory.set", "app.example.com", d.signAs("stranger", "iss-one", "acme"), "", setItem); got != "200" {
		t.Fatalf("somebody who is not provisioned, while it records: %s", got)
	}
	provision := func(who string) {
		t.Helper()
		if got := d.ask("POST", "/scim/v2/Users", "app.example.com", scimToken, "", `{"schemas":["urn:ietf:params:scim:schemas:core:2.0:User"],"userName":"`+who+`@example.com"}`); got != "201" {
			t.Fatalf("%s is provisioned: %s", who, got)
		}
	}
	provision("someone")
	// Killed at each step that is persisted, and run again.
	halt := filepath.Join(d.dir, "halt")
	for _, step := range []string{"checked", "directory", "held", "recorded", "enforced", "reported", "people", "triggers", "quiet", "placed"} {
		if err := os.WriteFile(halt, []byte(step), 0o600); err != nil {
			t.Fatal(err)
		}
		_ = os.Remove(halt + ".reached")
		args := append(attach[:len(attach):len(attach)], "--halt-file", halt)
		if step == "people" {
			one.refused("stranger of iss-one", attach...)
			args = append(args, "--revoke-unprovisioned")
		}
		cmd := one.command(args...)
		var out syncBuffer
		cmd.Stderr = &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		reached := func() bool { _, err := os.Stat(halt + ".reached"); return err == nil }
		eventually(t, "attach stands at "+step, func() bool { return reached() || cmd.ProcessState != nil })
		if got := d.ask("POST", "/v1/memory.set", "app.example.com", token, "", setItem); got != "200" {
			t.Errorf("a held tenant while attach stands at %s: %s", step, got)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	one.run(attach...)
	if got := d.ask("GET", "/cells/lookup?tenant=fresh", "x", "", "", ""); got != "200" {
		t.Errorf("lookup: %s", got)
	}
	if got := d.ask("POST", "/v1/memory.set", "app.example.com", d.signAs("stranger", "iss-one", "acme"), "", setItem); got != "403 FORBIDDEN" {
		t.Errorf("somebody who is not provisioned, after attach: %s", got)
	}
	provision("stranger")
	eventually(t, "somebody provisioned acts", func() bool {
		return d.ask("POST", "/v1/memory.set", "app.example.com", d.signAs("stranger", "iss-one", "acme"), "", setItem) == "200"
	})
	for _, tenant := range []string{"acme", "beta", "fresh"} {
		one.run("place", tenant) // placed and held already
		if got := d.ask("POST", "/v1/memory.set", "app.example.com", d.sign("iss-one", tenant), "", setItem); got != "200" {
			t.Errorf("%s after attach: %s", tenant, got)
		}
	}

	two := d.service("two", "two.example.com")
	two.start(true)
	if two.ready() {
		t.Error("two is ready before it was prepared")
	}
	two.run("prepare", "--host", "two.example.com", "--credential-sha256", two.sum, "--probe-url", "http://"+two.probe)
	eventually(t, "two is ready", two.ready)
	later := append(common, two.bot("each"), "--upstream", "http://"+two.addr, "--cells", filepath.Join(d.dir, "cells"))
	two.refused("triggers are not in order", later...)
	two.stop()
	two.start(true)
	eventually(t, "two is ready again", two.ready)
	eventually(t, "two is attached", func() bool { return two.command(later...).Run() == nil }) // the first process may still count as live
	for _, c := range []struct{ what, host, tenant, want string }{
		{"a new tenant of two", "two.example.com", "gamma", "200"}, {"by its issuer, on the shared host", "app.example.com", "gamma", "200"},
		{"a tenant of one, asked of two", "two.example.com", "acme", "409 WRONG_CELL"},
	} {
		got := ""
		eventually(t, c.what, func() bool { // the router reads its table behind requests
			got = d.ask("POST", "/v1/memory.set", c.host, d.sign("iss-two", c.tenant), "", setItem)
			return got == c.want
		})
	}
	two.refused("WRONG_CELL", "place", "acme")
	two.run("place", "delta")
	d.hostile(t, one, two)
	d.updated(t, one, two)

	// In every cell, and again where it failed.
	var proof []string
	record := "each.json"
	each := func(want int, args ...string) {
		t.Helper()
		cmd := exec.Command(filepath.Join(bin, "cell"), append(append([]string{"each", "--router", d.router, "--credential-file", d.operator, "--cells", filepath.Join(d.dir, "cells"),
			"--record", filepath.Join(d.dir, record)}, proof...), append([]string{"--"}, args...)...)...)
		out, _ := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != want {
			t.Errorf("each: exit %d, want %d\n%s", cmd.ProcessState.ExitCode(), want, out)
		}
	}
	script := fmt.Sprintf(`echo "$CELL $CELL_OPERATOR_CREDENTIAL_FILE" >> %[1]s/ran; test "$CELL" = one || test -e %[1]s/let`, d.dir)
	each(1, "sh", "-c", script)
	if err := os.WriteFile(filepath.Join(d.dir, "let"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	each(0, "sh", "-c", script)
	each(0, "sh", "-c", script)
	each(2, "true")
	if ran, err := os.ReadFile(filepath.Join(d.dir, "ran")); err != nil || string(ran) != "one \ntwo \ntwo \n" {
		t.Errorf("it ran as %q, %v", ran, err)
	}

	// With a token of each cell's bot, which SCIM does not know.
	record = "each-bot.json"
	proof = []string{"--bot", "each", "--bot-keys", filepath.Join(d.dir, "bots"), "--bot-address", "one=http://" + one.addr, "--bot-address", "two=http://" + two.addr}
	each(0, "sh", "-c", fmt.Sprintf(`printf %%s "$CELL_BOT_TOKEN" > %s/token-$CELL`, d.dir))
	for _, c := range []struct{ cell, host, tenant, want string }{
		{"one", "app.example.com", "acme", "200"}, {"one", "app.example.com", "beta", "200"}, {"one", "app.example.com", "unheld", "409 WRONG_CELL"},
		{"one", "two.example.com", "gamma", "401 UNAUTHENTICATED"}, {"two", "two.example.com", "gamma", "200"},
	} {
		token, err := os.ReadFile(filepath.Join(d.dir, "token-"+c.cell))
		if err != nil {
			t.Fatal(err)
		}
		if got := d.ask("POST", "/v1/memory.get", c.host, string(token), c.tenant, `{"namespace":"n","key":"k"}`); got != c.want {
			t.Errorf("the bot of %s at %s in %s: %s, want %s", c.cell, c.host, c.tenant, got, c.want)
		}
	}
	out, err := exec.Command(filepath.Join(bin, "cell"), "bot", "audit", "--env-file", one.env, "--json").Output()
	if err != nil || bytes.Count(out, []byte(`"bot.token"`)) != 1 || bytes.Count(out, []byte(`"bot.use"`)) != 3 || bytes.Contains(out, []byte("lcb_")) {
		t.Errorf("the audit of one: %s, %v", out, err)
	}
	// A key that is not the one that the directory knows.
	record = "each-wrong.json"
	if err := os.Rename(filepath.Join(d.dir, "bots", "two.jwk"), filepath.Join(d.dir, "bots", "one.jwk")); err != nil {
		t.Fatal(err)
	}
	each(1, "true")
}
