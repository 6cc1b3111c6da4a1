// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/internal/freeport"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/supervise"
)

// Client returns an operator's client of the fleet's directory.
func (f *Fleet) Client() (*client.Client, error) {
	return NewClient(f.Info.Operator, f.Layout.Credential())
}

// NewClient returns an operator's client; credentialFile holds the credential.
func NewClient(operator, credentialFile string) (*client.Client, error) {
	b, err := os.ReadFile(credentialFile)
	if err != nil {
		return nil, fmt.Errorf("operator credential: %w", err)
	}
	return client.New(operator, strings.TrimSpace(string(b)))
}

// registerCells tells the directory which cells there are; labels are brought up
// to date, what an operator changed since (closed, quota) is kept.
func (f *Fleet) registerCells(ctx context.Context) error {
	cl, err := f.Client()
	if err != nil {
		return err
	}
	have, err := cl.Cells(ctx)
	if err != nil {
		return err
	}
	specs := map[cells.CellID]api.CellSpec{}
	for _, c := range have {
		specs[c.ID] = c.CellSpec
		known := slices.ContainsFunc(f.Config.Cells, func(x Cell) bool { return x.Name == string(c.ID) })
		switch {
		case !known && c.Tenants > 0:
			return fmt.Errorf("cell %s has %d tenants in %s and is not among the cells to start (%s); start it too, with --cells %s, and move its tenants away before you leave it out",
				c.ID, c.Tenants, f.Layout.Dir, strings.Join(f.Info.Cells, ","), strings.Join(append(slices.Clone(f.Info.Cells), string(c.ID)), ","))
		case !known:
			f.o.Log.Warn("a registered cell is not started; new tenants may be placed in it unless it is closed (cell cells set)", "cell", c.ID)
		}
	}
	for _, c := range f.Config.Cells {
		spec := specs[cells.CellID(c.Name)]
		spec.Version, spec.Jurisdiction, spec.Geography, spec.Host = c.Version, c.Jurisdiction, c.Geography, c.Host
		spec.Default = c.Name == f.Config.DefaultCell
		spec.Revision = 0
		if _, err := cl.PutCell(ctx, cells.CellID(c.Name), spec); err != nil {
			return fmt.Errorf("register cell %s: %w", c.Name, err)
		}
	}
	return nil
}

func (f *Fleet) readyMembers(ctx context.Context) (map[string]int, error) {
	cl, err := f.Client()
	if err != nil {
		return nil, err
	}
	members, err := cl.Members(ctx)
	if err != nil {
		return nil, err
	}
	n := map[string]int{}
	for _, m := range members {
		if m.Ready {
			n[string(m.Cell)]++
		}
	}
	return n, nil
}

// startCell starts the cell's store and its processes.
func (f *Fleet) startCell(ctx context.Context, c Cell) error {
	st := store{dsn: filepath.Join(f.Layout.Cell(c.Name), "store.db")}
	if f.Config.Store == StorePostgres {
		var err error
		if st, err = f.startCluster(ctx, c.Name); err != nil {
			return fmt.Errorf("cell %s: %w", c.Name, err)
		}
	}
	if err := f.writeCellKey(c.Name); err != nil {
		return err
	}
	for n := 1; n <= c.Replicas; n++ {
		spec, err := f.process(c, n, st)
		if err != nil {
			return fmt.Errorf("cell %s: %w", c.Name, err)
		}
		spec.Remake = func(output string) *supervise.Spec {
			if f.o.Via != nil || !portTaken(output) {
				return nil
			}
			again, err := f.process(c, n, st)
			if err != nil {
				f.o.Log.Error("no other port for a process whose port was taken", "name", spec.Name, "err", err)
				return nil
			}
			return &again
		}
		if _, err := f.Procs.Start(spec); err != nil {
			return err
		}
	}
	return nil
}

// store is how a cell's processes reach their store.
type store struct {
	// dsn has no secret in it; secretDSN is the same with the password, if there is one.
	dsn, secretDSN string
	// passFile is for PGPASSFILE, "" without one.
	passFile string
}

// startCluster starts the cell's own Postgres server and keeps it running.
func (f *Fleet) startCluster(ctx context.Context, cell string) (store, error) {
	dir := f.Layout.Postgres(cell)
	old := filepath.Join(f.Layout.Cell(cell), "postgres") // where it was when cells' folders were open
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
	cluster, err := pgcluster.Start(ctx, pgcluster.Options{Dir: dir, NoSync: f.o.PostgresNoSync, Env: []string{processMark + cell + "-postgres"}})
	if err != nil {
		return store{}, err
	}
	f.mu.Lock()
	f.clusters[cell] = cluster
	f.mu.Unlock()
	f.keepers.Go(func() {
		cluster.Supervise(f.life, func(what string, err error) { f.o.Log.Warn(what, "cell", cell, "err", err) })
	})
	if err := cluster.CreateDatabase(ctx, "cell"); err != nil {
		return store{}, err
	}
	st := store{dsn: cluster.PublicURL("cell"), secretDSN: cluster.URL("cell"), passFile: f.Layout.PassFile(cell)}
	return st, writeFile(st.passFile, cluster.PassFile(), 0o600)
}

// portTaken reports whether a process ended because another one has its port.
func portTaken(output string) bool { return strings.Contains(output, "address already in use") }

// writeCellKey derives the cell's admission key: a cell can check the tokens made
// for it and cannot make another cell's.
func (f *Fleet) writeCellKey(cell string) error {
	key, err := ReadKey(f.Layout.AdmissionKey())
	if err != nil {
		return err
	}
	return writeFile(f.Layout.CellKey(cell), []byte(hex.EncodeToString(cells.DeriveCellKey(key, cells.CellID(cell)))), 0o600)
}

// process describes one process of a cell.
func (f *Fleet) process(c Cell, n int, st store) (supervise.Spec, error) {
	addr, err := freeport.Addr()
	if err != nil {
		return supervise.Spec{}, err
	}
	dir := f.Layout.Cell(c.Name)
	words := map[string]string{"listen": addr, "store": f.Config.Store, "dsn": st.dsn, "cell": c.Name, "version": c.Version, "state": dir}
	s := supervise.Spec{Name: fmt.Sprintf("%s-%d", c.Name, n), Dir: dir}
	for _, a := range c.Service.Command {
		v, err := expand(a, words)
		if err != nil {
			return s, fmt.Errorf("service.command %q: %w", a, err)
		}
		s.Args = append(s.Args, v)
	}
	if st.secretDSN != "" {
		words["dsn"] = st.secretDSN // an environment is not for everybody to see, a command line is
	}
	for k, a := range c.Service.Env {
		v, err := expand(a, words)
		if err != nil {
			return s, fmt.Errorf("service.env %s: %w", k, err)
		}
		s.Env = append(s.Env, k+"="+v)
	}
	if st.passFile != "" {
		s.Env = append(s.Env, "PGPASSFILE="+st.passFile)
	}
	cert, key := f.certFiles(channel.RoleCell, c.Name)
	s.Env = append(s.Env, processMark+s.Name,
		"CELL_ID="+c.Name, "CELL_FLEET="+f.Config.Name, "CELL_VERSION="+c.Version,
		"CELL_DIRECTORY_URL=https://"+f.o.via(c.Name, "directory", strings.TrimPrefix(f.Info.Channel, "https://")), "CELL_SERVICE_URL=http://"+addr,
		"CELL_CHANNEL_CA="+filepath.Join(f.Layout.PKI(), pki.CACertFile), "CELL_CHANNEL_CERT="+cert, "CELL_CHANNEL_KEY="+key,
		"CELL_CHANNEL_REVOKED="+filepath.Join(f.Layout.PKI(), pki.RevokedFile),
		"CELL_ADMISSION_KEY_FILE="+f.Layout.CellKey(c.Name), "CELL_DEFAULT_CELL="+f.Config.DefaultCell,
		"CELL_STATE_DIR="+filepath.Join(dir, fmt.Sprintf("member-%d", n)))
	if f.o.Via != nil {
		agent, err := freeport.Addr()
		if err != nil {
			return s, err
		}
		s.Env = append(s.Env, "CELL_AGENT_ADDR="+agent, "CELL_AGENT_URL=https://"+f.o.via("", c.Name, agent))
	}
	return s, nil
}
