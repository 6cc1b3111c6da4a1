// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/internal/files"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/supervise"
)

// Mark begins the environment variable that says which process of a fleet a process
// is: "<cell>-<n>" or "<cell>-postgres" for those that are started here.
const Mark = "CELL_DEV_PROCESS="

// Layout names the files of a fleet.
type Layout interface {
	// PKI is the folder of the fleet's CA, Certs that of a member's certificate.
	PKI() string
	Certs(name string) string
	// Cell is a cell's own folder, Postgres that of its server.
	Cell(name string) string
	Postgres(cell string) string
	PassFile(cell string) string
	// AdmissionKey is the fleet's key, CellKey what a cell gets of it.
	AdmissionKey() string
	CellKey(cell string) string
	// Secret is the file that a SecretRef refers to.
	Secret(name, key string) string
	// Retired is where a cell's store is put when it is kept.
	Retired(cell string, generation int64) string
}

// Config is what a [Provisioner] is made of.
type Config struct {
	// Fleet is the fleet's name, as the certificates have it.
	Fleet  string
	Layout Layout
	// Procs runs the processes, under the names "<cell>-<n>".
	Procs *supervise.Group
	Log   *slog.Logger
	// Directory gives the directory's channel address, as the cell reaches it.
	Directory func(cell cells.CellID) string
	// Living asks the directory which processes of a cell it hears.
	Living func(ctx context.Context, cell cells.CellID) ([]provision.Live, error)
	// Engine is for specs that name none.
	Engine      string
	DefaultCell cells.CellID
	// Agent, if set, gives the address of a process's agent and the URL at which others
	// reach it. Ports do not change then when one is taken.
	Agent func(cell cells.CellID) (addr, url string, err error)
	// BeforePostgres, if set, is called before a Postgres server is started.
	BeforePostgres func() error
	// NoSync gives up durability of Postgres against a crash of the machine.
	NoSync bool
	// ReadyWithin is how long a new process may take to be ready; default 60 s.
	ReadyWithin time.Duration
	// LeaveWithin is how long a process may take to end after it was told to; default 8 s.
	LeaveWithin time.Duration
}

// Provisioner makes cells of processes. Close it.
type Provisioner struct {
	cfg  Config
	life context.Context
	end  context.CancelFunc
	// keepers are what looks after the Postgres servers.
	keepers sync.WaitGroup

	mu    sync.Mutex
	cells map[cells.CellID]*cell // guarded by mu
	ca    *pki.Authority         // guarded by mu
}

var _ provision.Provisioner = (*Provisioner)(nil)

// cell is what this process runs of a cell.
type cell struct {
	id cells.CellID
	// busy is held during a call: calls for one cell take turns.
	busy sync.Mutex

	mu       sync.Mutex // guards the fields below
	procs    map[int]*proc
	store    *store
	cluster  *pgcluster.Cluster
	unkeep   func() // ends what looks after the server
	observed int64  // generation of the last call that was completed
	draining bool
	last     provision.Spec
}

// proc is one process.
type proc struct {
	n       int
	name    string
	version string
	// print tells processes of one spec from those of another.
	print string
	addr  string // guarded by cell.mu: another port when it was taken
	child *supervise.Proc
}

// New returns a provisioner. Nothing runs yet.
func New(cfg Config) *Provisioner {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.ReadyWithin <= 0 {
		cfg.ReadyWithin = time.Minute
	}
	if cfg.LeaveWithin <= 0 {
		cfg.LeaveWithin = 8 * time.Second
	}
	p := &Provisioner{cfg: cfg, cells: map[cells.CellID]*cell{}}
	p.life, p.end = context.WithCancel(context.Background())
	return p
}

// Close stops the Postgres servers. The processes are the group's, which is closed
// before.
func (p *Provisioner) Close() {
	p.end()
	p.keepers.Wait()
	p.mu.Lock()
	list := p.cells
	p.cells = map[cells.CellID]*cell{}
	p.mu.Unlock()
	for _, c := range list {
		c.mu.Lock()
		cluster := c.cluster
		c.cluster = nil
		c.mu.Unlock()
		if cluster != nil {
			_ = cluster.Stop()
		}
	}
}

// Cluster returns the Postgres server of a cell, or nil.
func (p *Provisioner) Cluster(id cells.CellID) *pgcluster.Cluster {
	c := p.cell(id)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cluster
}

func (p *Provisioner) cell(id cells.CellID) *cell {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.cells[id]
	if c == nil {
		c = &cell{id: id, procs: map[int]*proc{}}
		p.cells[id] = c
	}
	return c
}

// Provision implements [provision.Provisioner].
func (p *Provisioner) Provision(ctx context.Context, s provision.Spec) error {
	return p.call(ctx, s, func(c *cell) error {
		for {
			fresh, old := c.split(fingerprint(&s))
			if len(fresh)+len(old) >= s.Replicas {
				return p.ready(ctx, c, fresh)
			}
			if _, err := p.start(c, &s); err != nil {
				return err
			}
		}
	})
}

// Upgrade implements [provision.Provisioner].
func (p *Provisioner) Upgrade(ctx context.Context, s provision.Spec) error {
	return p.call(ctx, s, func(c *cell) error {
		c.mark(false)
		for {
			fresh, old := c.split(fingerprint(&s))
			switch {
			case len(fresh) < s.Replicas && len(fresh)+len(old) <= s.Replicas:
				n, err := p.start(c, &s)
				if err != nil {
					return err
				}
				if err := p.ready(ctx, c, []*proc{n}); err != nil {
					if len(old) > 0 && ctx.Err() == nil {
						p.stop(c, n) // the old ones serve on
					}
					return err
				}
			case len(old) > 0 || len(fresh) > s.Replicas:
				if err := p.ready(ctx, c, fresh); err != nil {
					return err
				}
				if len(old) == 0 {
					old = fresh[s.Replicas:]
				}
				p.stop(c, old[0])
			default:
				return p.ready(ctx, c, fresh)
			}
			if err := context.Cause(ctx); err != nil {
				return err
			}
		}
	})
}

// Drain implements [provision.Provisioner].
func (p *Provisioner) Drain(ctx context.Context, s provision.Spec) error {
	return p.call(ctx, s, func(c *cell) error {
		c.mark(true)
		return nil
	})
}

func (c *cell) mark(draining bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.draining = draining
}

// call makes what the cell needs, does one step with it, and notes that it is done.
func (p *Provisioner) call(ctx context.Context, s provision.Spec, do func(*cell) error) error {
	if err := s.Validate(); err != nil {
		return err
	}
	if len(s.Command) == 0 {
		return fmt.Errorf("%w: %w: version %s has no command, and an image is no program here", cells.ErrInvalid, provision.ErrUnsupported, s.Version)
	}
	c := p.cell(s.Cell)
	c.busy.Lock()
	defer c.busy.Unlock()
	if err := p.prepare(ctx, c, &s); err != nil {
		return err
	}
	if err := do(c); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.observed, c.last = s.Generation, s
	return nil
}

// split parts the processes of the spec from the others, each in order.
func (c *cell) split(print string) (fresh, old []*proc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, x := range c.procs {
		if x.print == print {
			fresh = append(fresh, x)
		} else {
			old = append(old, x)
		}
	}
	byNumber := func(a, b *proc) int { return a.n - b.n }
	slices.SortFunc(fresh, byNumber)
	slices.SortFunc(old, byNumber)
	return fresh, old
}

// Status implements [provision.Provisioner].
func (p *Provisioner) Status(ctx context.Context, id cells.CellID) (provision.Status, error) {
	c := p.cell(id)
	st := provision.Status{Cell: id}
	c.mu.Lock()
	last, draining := c.last, c.draining
	st.ObservedGeneration = c.observed
	type process struct{ addr, version, print string }
	var procs []process
	for _, x := range c.procs {
		procs = append(procs, process{x.addr, x.version, x.print})
	}
	c.mu.Unlock()
	st.Replicas = len(procs)
	if len(procs) == 0 {
		st.Phase = provision.PhasePending
		if _, err := os.Lstat(p.cfg.Layout.Cell(string(id))); errors.Is(err, fs.ErrNotExist) {
			st.Phase = provision.PhaseRetired
		}
		return st, nil
	}
	living, err := p.cfg.Living(ctx, id)
	if err != nil {
		return st, err
	}
	ready := map[string]bool{}
	for _, l := range living {
		ready[l.ServiceURL] = ready[l.ServiceURL] || l.Ready
	}
	print, one := fingerprint(&last), procs[0].version
	mixed := false
	for _, x := range procs {
		if ready["http://"+x.addr] {
			st.Ready++
			if x.print == print {
				st.Updated++
			}
		}
		mixed = mixed || x.print != procs[0].print
		if x.version != one {
			one = ""
		}
	}
	st.Version = one
	switch {
	case mixed:
		st.Phase = provision.PhaseUpgrading
	case draining:
		st.Phase = provision.PhaseDraining
	case st.Ready == len(procs) && st.Updated == last.Replicas:
		st.Phase = provision.PhaseRunning
	default:
		st.Phase = provision.PhaseProvisioning
	}
	return st, nil
}

// Retire implements [provision.Provisioner].
func (p *Provisioner) Retire(_ context.Context, s provision.Spec) error {
	if err := s.Cell.Validate(); err != nil {
		return err
	}
	c := p.cell(s.Cell)
	c.busy.Lock()
	defer c.busy.Unlock()
	fresh, old := c.split("")
	var wg sync.WaitGroup
	for _, x := range append(fresh, old...) {
		wg.Go(func() { p.stop(c, x) })
	}
	wg.Wait()
	c.mu.Lock()
	cluster, unkeep := c.cluster, c.unkeep
	c.cluster, c.store = nil, nil
	c.mu.Unlock()
	if cluster != nil {
		unkeep()
		if err := cluster.Stop(); err != nil {
			c.mu.Lock()
			c.cluster = cluster
			c.mu.Unlock()
			return fmt.Errorf("cell %s: its Postgres server does not stop: %w", s.Cell, err)
		}
	}
	if err := p.remove(s); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.observed, c.draining, c.last = s.Generation, false, s
	return nil
}

// remove removes the files of a cell that does not run.
func (p *Provisioner) remove(s provision.Spec) error {
	name, l := string(s.Cell), p.cfg.Layout
	if err := p.revoke(s.Cell); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(l.Certs(name)), os.RemoveAll(l.CellKey(name))); err != nil {
		return err
	}
	for _, x := range []struct{ dir, as string }{{l.Postgres(name), "postgres"}, {l.Cell(name), "cell"}} {
		if !s.KeepStore {
			if err := os.RemoveAll(x.dir); err != nil {
				return err
			}
			continue
		}
		to := l.Retired(name, s.Generation)
		if err := files.Folder(to, 0o700); err != nil {
			return err
		}
		if err := os.Rename(x.dir, filepath.Join(to, x.as)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// revoke puts the cell's certificate on the list of revoked ones.
func (p *Provisioner) revoke(id cells.CellID) error {
	cert, _ := CertFiles(p.cfg.Layout.Certs(string(id)), channel.Identity{Role: channel.RoleCell, Name: string(id)})
	if _, err := os.Stat(cert); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	ca, err := p.authority()
	if err != nil {
		return err
	}
	info, err := pki.Inspect(cert, ca.CAFile(), ca.RevokedFile(), time.Now())
	if err != nil {
		return err
	}
	return ca.Revoke(info.Serial, "cell retired")
}

// authority loads the CA; p.mu is held.
func (p *Provisioner) authority() (*pki.Authority, error) {
	if p.ca == nil {
		ca, err := pki.LoadAuthority(p.cfg.Layout.PKI(), pki.Options{})
		if err != nil {
			return nil, err
		}
		p.ca = ca
	}
	return p.ca, nil
}
