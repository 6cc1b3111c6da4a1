// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/directory/provision/process"
	"github.com/cloister-dev/cloister/internal/freeport"
)

// Actor is who the specs of the fleet file's cells are from. What an operator has
// changed since is the operator's: the next start does not take it back.
const Actor = "cell dev"

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

// openProvisioner makes what makes cells: it reads the directory's specs over the channel,
// and runs processes here.
func (f *Fleet) openProvisioner() error {
	cert, key := f.certFiles(channel.RoleProvisioner, "main")
	ch, err := channel.Open(channel.Config{CAFile: f.Layout.PKI() + "/" + pki.CACertFile, CertFile: cert, KeyFile: key,
		RevokedFile: f.Layout.PKI() + "/" + pki.RevokedFile, Log: f.o.Log})
	if err != nil {
		return err
	}
	if f.source, err = client.Provisioner(ch.Client(channel.Identity{Role: channel.RoleDirectory}), f.Info.Channel); err != nil {
		return err
	}
	cfg := process.Config{
		Fleet: f.Config.Name, Layout: f.Layout, Procs: f.Procs, Log: f.o.Log, Living: f.source.Living, Engine: f.Config.Store,
		DefaultCell: cells.CellID(f.Config.DefaultCell), NoSync: f.o.PostgresNoSync, BeforePostgres: f.Layout.walkable,
		Directory: func(cell cells.CellID) string {
			return "https://" + f.o.via(string(cell), "directory", strings.TrimPrefix(f.Info.Channel, "https://"))
		},
	}
	if f.o.Via != nil {
		cfg.Agent = func(cell cells.CellID) (string, string, error) {
			addr, err := freeport.Addr()
			return addr, "https://" + f.o.via("", string(cell), addr), err
		}
	}
	f.cells = process.New(cfg)
	return nil
}

// wish tells the directory what the fleet file's cells should be, and returns the
// specs of those that are to run: what an operator has changed since is kept.
func (f *Fleet) wish(ctx context.Context) ([]provision.Spec, error) {
	cl, err := f.Client()
	if err != nil {
		return nil, err
	}
	defer cl.CloseIdleConnections()
	have, err := cl.ProvisionedCells(ctx)
	if err != nil {
		return nil, err
	}
	records := map[cells.CellID]provision.Record{}
	for _, p := range have {
		records[p.Spec.Cell] = p.Record
	}
	if err := f.leftOut(ctx, cl, records); err != nil {
		return nil, err
	}
	var out []provision.Spec
	for _, c := range f.Config.Cells {
		id := cells.CellID(c.Name)
		if r, ok := records[id]; ok && r.Actor != Actor {
			if r.Spec.Desired != provision.DesiredRetired {
				out = append(out, r.Spec)
			}
			continue
		}
		if err := f.version(ctx, cl, c); err != nil {
			return nil, fmt.Errorf("version %s of cell %s: %w", c.Version, c.Name, err)
		}
		p, err := cl.ProvisionCell(ctx, id, api.ProvisionRequest{Version: c.Version, Command: c.Service.Command, Env: c.Service.Env, Replicas: c.Replicas,
			Store: provision.StoreSpec{Engine: f.Config.Store}, Jurisdiction: c.Jurisdiction, Geography: c.Geography, Host: c.Host, Actor: Actor})
		if err != nil {
			return nil, fmt.Errorf("register cell %s: %w", c.Name, err)
		}
		out = append(out, p.Spec)
		if err := f.putDefault(ctx, cl, p.Cell); err != nil {
			return nil, fmt.Errorf("register cell %s: %w", c.Name, err)
		}
	}
	return out, nil
}

// version has the catalogue know the fleet file's versions: the service's command, at
// the place where its program is now.
func (f *Fleet) version(ctx context.Context, cl *client.Client, c Cell) error {
	if f.versions == nil {
		f.versions = map[string]bool{}
	}
	if f.versions[c.Version] {
		return nil // the first cell of a version says how it is run
	}
	f.versions[c.Version] = true
	_, err := cl.PutVersion(ctx, c.Version, api.VersionRequest{Command: c.Service.Command, Actor: Actor, Replace: true})
	return err
}

func (f *Fleet) putDefault(ctx context.Context, cl *client.Client, c *api.Cell) error {
	want := string(c.ID) == f.Config.DefaultCell
	if c.Default == want {
		return nil
	}
	spec := c.CellSpec
	spec.Default, spec.Revision = want, 0
	_, err := cl.PutCell(ctx, c.ID, spec)
	return err
}

// leftOut refuses to start without a cell of the file that has tenants; those of which the
// directory has specs by others are started whatever the file says.
func (f *Fleet) leftOut(ctx context.Context, cl *client.Client, records map[cells.CellID]provision.Record) error {
	list, err := cl.Cells(ctx)
	if err != nil {
		return err
	}
	for _, c := range list {
		r, ok := records[c.ID]
		switch {
		case f.configured(c.ID), ok && r.Actor != Actor:
		case c.Tenants > 0:
			return fmt.Errorf("cell %s has %d tenants in %s and is not among the cells to start (%s); start it too, with --cells %s, and move its tenants away before you leave it out",
				c.ID, c.Tenants, f.Layout.Dir, strings.Join(f.Info.Cells, ","), strings.Join(append(slices.Clone(f.Info.Cells), string(c.ID)), ","))
		default:
			f.o.Log.Warn("a registered cell is not started; new tenants may be placed in it unless it is closed (cell cells set)", "cell", c.ID)
		}
	}
	return nil
}

func (f *Fleet) configured(id cells.CellID) bool {
	return slices.ContainsFunc(f.Config.Cells, func(c Cell) bool { return c.Name == string(id) })
}

// startCells starts the cells of the file, all at once, and waits until they are ready.
func (f *Fleet) startCells(ctx context.Context, list []provision.Spec) error {
	var wg sync.WaitGroup
	errs := make([]error, len(list))
	for i, s := range list {
		wg.Go(func() { errs[i] = f.cells.Provision(ctx, s) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// reconcile has everything that the directory wants done from now on.
func (f *Fleet) reconcile() {
	r := provision.NewReconciler(provision.ReconcilerConfig{Source: f.source, Provisioner: f.cells, Log: f.o.Log,
		Mine: func(r *provision.Record) bool { return r.Actor != Actor || f.configured(r.Spec.Cell) }})
	ctx, end := context.WithCancel(f.life)
	ended := make(chan struct{})
	f.interrupt = func() { end(); <-ended }
	f.keepers.Go(func() {
		defer close(ended)
		r.Run(ctx)
	})
}

// InterruptProvisioner ends what makes the cells as the directory wants them, in the
// middle of what it does, and starts it anew from the directory's specs; what runs goes on
// running. For tests; not at the same time as Close.
func (f *Fleet) InterruptProvisioner() {
	f.interrupt()
	f.reconcile()
}

// serving returns how many processes of each cell are ready, and which cells serve.
func (f *Fleet) serving(ctx context.Context) (ready map[cells.CellID]int, serves map[cells.CellID]bool, err error) {
	cl, err := f.Client()
	if err != nil {
		return nil, nil, err
	}
	defer cl.CloseIdleConnections()
	members, err := cl.Members(ctx)
	if err != nil {
		return nil, nil, err
	}
	list, err := cl.Cells(ctx)
	if err != nil {
		return nil, nil, err
	}
	ready, serves = map[cells.CellID]int{}, map[cells.CellID]bool{}
	for _, m := range members {
		if m.Ready {
			ready[m.Cell]++
		}
	}
	for _, c := range list {
		serves[c.ID] = c.State == api.CellServing
	}
	return ready, serves, nil
}
