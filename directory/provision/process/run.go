// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/internal/files"
	"github.com/cloister-dev/cloister/internal/freeport"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/supervise"
)

// store is how a cell's processes reach their store.
type store struct {
	engine string
	// dsn has no secret in it; secretDSN is the same with the password, if there is one.
	dsn, secretDSN string
	// passFile is for PGPASSFILE, "" without one.
	passFile string
}

// prepare makes the folder, the certificate, the key and the store of a cell, as far as
// they are not there.
func (p *Provisioner) prepare(ctx context.Context, c *cell, s *provision.Spec) error {
	name := string(s.Cell)
	if err := files.Folder(p.cfg.Layout.Cell(name), 0o700); err != nil {
		return err
	}
	p.mu.Lock()
	ca, err := p.authority()
	if err == nil {
		err = Certificate(ca, p.cfg.Layout.Certs(name), channel.Identity{Role: channel.RoleCell, Name: name})
	}
	p.mu.Unlock()
	if err != nil {
		return fmt.Errorf("cell %s: certificate: %w", s.Cell, err)
	}
	if err := p.writeCellKey(name); err != nil {
		return fmt.Errorf("cell %s: admission key: %w", s.Cell, err)
	}
	c.mu.Lock()
	have := c.store
	c.mu.Unlock()
	if have != nil {
		return nil
	}
	st, err := p.makeStore(ctx, c, s)
	if err != nil {
		return fmt.Errorf("cell %s: store: %w", s.Cell, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.store = &st
	return nil
}

func (p *Provisioner) makeStore(ctx context.Context, c *cell, s *provision.Spec) (store, error) {
	st := store{engine: s.Store.Engine}
	if st.engine == "" {
		st.engine = p.cfg.Engine
	}
	switch {
	case st.engine == provision.EngineNone:
		return st, nil
	case st.engine == provision.EngineSQLite:
		st.dsn = filepath.Join(p.cfg.Layout.Cell(string(s.Cell)), "store.db")
		return st, nil
	case st.engine != provision.EnginePostgres:
		return st, fmt.Errorf("%w: %w: engine %q", cells.ErrInvalid, provision.ErrUnsupported, st.engine)
	case s.Store.DSN.IsZero():
		return p.startCluster(ctx, c)
	}
	dsn, err := p.secret(s.Store.DSN)
	if err != nil {
		return st, err
	}
	st.dsn, st.secretDSN = "", dsn // only a variable gets it
	return st, nil
}

// startCluster starts the cell's own Postgres server and keeps it running.
func (p *Provisioner) startCluster(ctx context.Context, c *cell) (store, error) {
	name := string(c.id)
	if p.cfg.BeforePostgres != nil {
		if err := p.cfg.BeforePostgres(); err != nil {
			return store{}, err
		}
	}
	dir := p.cfg.Layout.Postgres(name)
	old := filepath.Join(p.cfg.Layout.Cell(name), "postgres") // where it was when cells' folders were open
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(old); err == nil {
			if err := errors.Join(os.MkdirAll(filepath.Dir(dir), 0o700), os.Rename(old, dir)); err != nil {
				return store{}, err
			}
		}
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return store{}, err
	}
	c.mu.Lock()
	cluster := c.cluster
	c.mu.Unlock()
	if cluster == nil {
		var err error
		// The server outlives the call that starts it.
		cluster, err = pgcluster.Start(ctx, pgcluster.Options{Dir: dir, NoSync: p.cfg.NoSync, Env: []string{Mark + name + "-postgres"}})
		if err != nil {
			return store{}, err
		}
		keep, unkeep := context.WithCancel(p.life)
		c.mu.Lock()
		c.cluster, c.unkeep = cluster, unkeep
		c.mu.Unlock()
		p.keepers.Go(func() {
			cluster.Supervise(keep, func(what string, err error) { p.cfg.Log.Warn(what, "cell", name, "err", err) })
		})
	}
	if err := cluster.CreateDatabase(ctx, "cell"); err != nil {
		return store{}, err
	}
	st := store{engine: provision.EnginePostgres, dsn: cluster.PublicURL("cell"), secretDSN: cluster.URL("cell"), passFile: p.cfg.Layout.PassFile(name)}
	return st, files.Write(st.passFile, cluster.PassFile(), 0o600)
}

// CertFiles names the files of a member's certificate and key in its folder.
func CertFiles(dir string, id channel.Identity) (cert, key string) {
	base := filepath.Join(dir, string(id.Role)+"-"+id.Name)
	return base + ".crt", base + ".key"
}

// Certificate makes a member's certificate in dir, and renews one that ends within 30
// days.
func Certificate(ca *pki.Authority, dir string, id channel.Identity) error {
	cert, key := CertFiles(dir, id)
	if _, err := os.Stat(cert); err != nil {
		_, err := ca.Issue(id, pki.IssueOptions{Dir: dir})
		return err
	}
	info, err := pki.Inspect(cert, ca.CAFile(), ca.RevokedFile(), time.Now().Add(30*24*time.Hour))
	if err == nil && len(info.Problems) == 0 {
		return nil
	}
	_, err = ca.Renew(cert, key, channel.Identity{}, 0)
	return err
}

// writeCellKey derives the cell's admission key: a cell can check the tokens made
// for it and cannot make another cell's.
func (p *Provisioner) writeCellKey(cell string) error {
	key, err := ReadKey(p.cfg.Layout.AdmissionKey())
	if err != nil {
		return err
	}
	return files.Write(p.cfg.Layout.CellKey(cell), []byte(hex.EncodeToString(cells.DeriveCellKey(key, cells.CellID(cell)))), 0o600)
}

// ReadKey reads a key of at least 16 bytes, written in hexadecimal.
func ReadKey(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	key, err := hex.DecodeString(strings.TrimSpace(string(b)))
	if err != nil || len(key) < 16 {
		return nil, fmt.Errorf("%s does not hold at least 32 hexadecimal digits", path)
	}
	return key, nil
}

// secret reads what is referred to. The error never has it.
func (p *Provisioner) secret(ref provision.SecretRef) (string, error) {
	if err := ref.Validate(); err != nil {
		return "", err
	}
	b, err := os.ReadFile(p.cfg.Layout.Secret(ref.Name, ref.Key))
	if err != nil {
		return "", fmt.Errorf("secret %s, key %s: %w", ref.Name, ref.Key, err)
	}
	return strings.TrimSuffix(string(b), "\n"), nil
}

// fingerprint tells the processes of one spec from those of another.
func fingerprint(s *provision.Spec) string {
	b, err := json.Marshal([]any{s.Version, s.Command, s.Env, s.Secrets})
	if err != nil { // strings always marshal
		return ""
	}
	return string(b)
}

// start starts one more process of the spec.
func (p *Provisioner) start(c *cell, s *provision.Spec) (*proc, error) {
	c.mu.Lock()
	n := 1
	for c.procs[n] != nil {
		n++
	}
	c.mu.Unlock()
	x := &proc{n: n, name: fmt.Sprintf("%s-%d", s.Cell, n), version: s.Version, print: fingerprint(s)}
	spec := s.Clone()
	run, addr, err := p.process(c, &spec, n)
	if err != nil {
		return nil, fmt.Errorf("cell %s: %w", s.Cell, err)
	}
	x.addr = addr
	run.Remake = func(output string) *supervise.Spec {
		if p.cfg.Agent != nil || !PortTaken(output) {
			return nil
		}
		again, addr, err := p.process(c, &spec, n)
		if err != nil {
			p.cfg.Log.Error("no other port for a process whose port was taken", "name", x.name, "err", err)
			return nil
		}
		c.mu.Lock()
		x.addr = addr
		c.mu.Unlock()
		return &again
	}
	if x.child, err = p.cfg.Procs.Start(run); err != nil {
		return nil, fmt.Errorf("cell %s: %w", s.Cell, err)
	}
	c.mu.Lock()
	c.procs[n] = x
	c.mu.Unlock()
	p.cfg.Log.Info("process started", "name", x.name, "version", s.Version)
	return x, nil
}

// PortTaken reports whether a process ended because another one has its port.
func PortTaken(output string) bool { return strings.Contains(output, "address already in use") }

// stop tells a process to leave, and waits until it has ended.
func (p *Provisioner) stop(c *cell, x *proc) {
	p.cfg.Procs.Remove(x.name)
	c.mu.Lock()
	delete(c.procs, x.n)
	c.mu.Unlock()
	p.cfg.Log.Info("process ended", "name", x.name, "version", x.version)
}

// ready waits until all of the processes are.
func (p *Provisioner) ready(ctx context.Context, c *cell, list []*proc) error {
	ctx, cancel := context.WithTimeoutCause(ctx, p.cfg.ReadyWithin, errLate)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	before := map[*proc]int{}
	for _, x := range list {
		before[x] = x.child.Restarts()
	}
	for {
		why, err := p.unready(ctx, c, list, before)
		if err != nil || why == "" {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("cell %s: %w: %s", c.id, context.Cause(ctx), why)
		case <-tick.C:
		}
	}
}

var errLate = errors.New("not ready in time")

// unready says which processes are not ready; an error when waiting will not help. before
// is how often each had ended when the waiting began.
func (p *Provisioner) unready(ctx context.Context, c *cell, list []*proc, before map[*proc]int) (why string, err error) {
	if len(list) == 0 {
		return "", nil
	}
	living, err := p.cfg.Living(ctx, c.id)
	if err != nil {
		return "the directory does not say who lives: " + err.Error(), nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var missing []string
	for _, x := range list {
		reason := "not heard of yet"
		ready := slices.ContainsFunc(living, func(l provision.Live) bool {
			if l.ServiceURL != "http://"+x.addr {
				return false
			}
			if l.Reason != "" {
				reason = l.Reason
			}
			return l.Ready
		})
		if ready {
			continue
		}
		if n := x.child.Restarts() - before[x]; n >= 4 {
			lines := strings.Split(strings.TrimSpace(x.child.Output(0)), "\n")
			return "", fmt.Errorf("%s ended %d times by itself; it last said: %s (log: %s)", x.name, n, lines[len(lines)-1], x.child.Log())
		}
		missing = append(missing, fmt.Sprintf("%s: %s (log: %s)", x.name, reason, x.child.Log()))
	}
	return strings.Join(missing, "; "), nil
}

// process describes one process of a cell.
func (p *Provisioner) process(c *cell, s *provision.Spec, n int) (supervise.Spec, string, error) {
	addr, err := freeport.Addr()
	if err != nil {
		return supervise.Spec{}, "", err
	}
	c.mu.Lock()
	st := *c.store
	c.mu.Unlock()
	name, l := string(s.Cell), p.cfg.Layout
	dir := l.Cell(name)
	words := map[string]string{"listen": addr, "store": st.engine, "dsn": st.dsn, "cell": name, "version": s.Version, "state": dir}
	out := supervise.Spec{Name: fmt.Sprintf("%s-%d", name, n), Dir: dir, Grace: p.cfg.LeaveWithin}
	for _, a := range s.Command {
		v, err := provision.Expand(a, words)
		if err != nil {
			return out, "", fmt.Errorf("command %q: %w", a, err)
		}
		out.Args = append(out.Args, v)
	}
	if st.secretDSN != "" {
		words["dsn"] = st.secretDSN // an environment is not for everybody to see, a command line is
	}
	for _, k := range slices.Sorted(maps.Keys(s.Env)) {
		v, err := provision.Expand(s.Env[k], words)
		if err != nil {
			return out, "", fmt.Errorf("variable %s: %w", k, err)
		}
		out.Env = append(out.Env, k+"="+v)
	}
	for _, k := range slices.Sorted(maps.Keys(s.Secrets)) {
		v, err := p.secret(s.Secrets[k])
		if err != nil {
			return out, "", fmt.Errorf("variable %s: %w", k, err)
		}
		out.Env = append(out.Env, k+"="+v)
	}
	if st.passFile != "" {
		out.Env = append(out.Env, "PGPASSFILE="+st.passFile)
	}
	cert, key := CertFiles(l.Certs(name), channel.Identity{Role: channel.RoleCell, Name: name})
	out.Env = append(out.Env, Mark+out.Name,
		"CELL_ID="+name, "CELL_FLEET="+p.cfg.Fleet, "CELL_VERSION="+s.Version,
		"CELL_DIRECTORY_URL="+p.cfg.Directory(s.Cell), "CELL_SERVICE_URL=http://"+addr,
		"CELL_CHANNEL_CA="+filepath.Join(l.PKI(), pki.CACertFile), "CELL_CHANNEL_CERT="+cert, "CELL_CHANNEL_KEY="+key,
		"CELL_CHANNEL_REVOKED="+filepath.Join(l.PKI(), pki.RevokedFile),
		"CELL_ADMISSION_KEY_FILE="+l.CellKey(name), "CELL_DEFAULT_CELL="+string(p.cfg.DefaultCell),
		"CELL_STATE_DIR="+filepath.Join(dir, fmt.Sprintf("member-%d", n)))
	if p.cfg.Agent != nil {
		at, url, err := p.cfg.Agent(s.Cell)
		if err != nil {
			return out, "", err
		}
		out.Env = append(out.Env, "CELL_AGENT_ADDR="+at, "CELL_AGENT_URL="+url)
	}
	return out, addr, nil
}
