// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/directory/provision/process"
	"github.com/cloister-dev/cloister/internal/files"
	"github.com/cloister-dev/cloister/internal/freeport"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/supervise"
)

// Options adjust how a fleet is started; the zero value is what cell dev uses.
type Options struct {
	// Dir is the state folder.
	Dir string
	// Cell is the path of the cell binary that runs the directory and the edge; ""
	// means the running program.
	Cell string
	Log  *slog.Logger
	// DirectoryArgs and EdgeArgs are added to their command lines.
	DirectoryArgs, EdgeArgs []string
	// PostgresNoSync gives up durability against a crash of the machine; for tests.
	PostgresNoSync bool
	// Via, if set, gives the address at which one process reaches another: from is
	// "edge" or a cell, to "directory" or a cell (its agent, which the directory and all
	// other cells reach: from is "" then), addr the host:port that it listens on. For
	// tests that cut the network. Cells have one process each then.
	Via func(from, to, addr string) string
	// OnStep, if set, is told what is being started.
	OnStep func(string)
}

// via is how from reaches to.
func (o *Options) via(from, to, addr string) string {
	if o.Via == nil {
		return addr
	}
	return o.Via(from, to, addr)
}

// Fleet is a running fleet. Close it.
type Fleet struct {
	Config Config
	Info   Info
	Layout Layout
	// Procs has the processes: "directory", "edge", and "<cell>-<n>" of each cell.
	Procs *supervise.Group

	o       Options
	release func()
	// life ends at Close; keepers are what reconciles the cells until then.
	life    context.Context
	end     context.CancelFunc
	keepers sync.WaitGroup
	// interrupt ends what reconciles and waits for it; set by reconcile.
	interrupt func()
	// source has the directory's specs, cells makes them run.
	source *client.ProvisionerClient
	cells  *process.Provisioner
	// versions are those that the catalogue was told of.
	versions map[string]bool
}

// Start starts a fleet and returns once the directory, the edge and a process of
// every cell are ready. On an error nothing is left running.
func Start(ctx context.Context, cfg Config, o Options) (_ *Fleet, err error) {
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return nil, err
	}
	if err := cfg.Adopt(o.Dir); err != nil {
		return nil, err
	}
	if err := cfg.Complete(); err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.OnStep == nil {
		o.OnStep = func(string) {}
	}
	if o.Cell == "" {
		if o.Cell, err = os.Executable(); err != nil {
			return nil, err
		}
	}
	// What is wrong outside is found before there is a folder.
	listen, err := freeAddr(cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen: %w; choose another address with --listen", err)
	}
	for _, c := range cfg.Cells {
		if _, err := exec.LookPath(c.Service.Command[0]); err != nil {
			return nil, fmt.Errorf("service.command of %s: %w", c.Name, err)
		}
	}
	f := &Fleet{Config: cfg, Layout: Layout{o.Dir}, o: o}
	f.life, f.end = context.WithCancel(context.WithoutCancel(ctx))
	if f.release, err = f.Layout.take(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if f.Procs, err = supervise.New(f.Layout.Logs(), o.Log); err != nil {
		return nil, err
	}
	if err := f.start(ctx, listen); err != nil {
		return nil, err
	}
	return f, nil
}

func (f *Fleet) start(ctx context.Context, listen string) error {
	f.Info = Info{Name: f.Config.Name, PID: os.Getpid(), Edge: "http://" + listen, Store: f.Config.Store}
	for _, c := range f.Config.Cells {
		f.Info.Cells = append(f.Info.Cells, c.Name)
	}
	if err := f.Layout.protect(); err != nil {
		return err
	}
	if _, err := secret(f.Layout.Credential(), func() string { c, _ := directory.NewOperatorCredential(); return c }); err != nil {
		return err
	}
	if _, err := secret(f.Layout.AdmissionKey(), newKey); err != nil {
		return err
	}
	if _, err := secret(f.Layout.engine(), func() string { return f.Config.Store }); err != nil {
		return err
	}
	f.o.OnStep("certificates")
	if err := f.certificates(); err != nil {
		return fmt.Errorf("certificates: %w", err)
	}
	f.o.OnStep("directory")
	if err := f.onFreePorts("directory", func() error { return f.startDirectory(ctx) }); err != nil {
		return fmt.Errorf("directory: %w", err)
	}
	if err := f.openProvisioner(); err != nil {
		return fmt.Errorf("provisioner: %w", err)
	}
	specs, err := f.wish(ctx)
	if err != nil {
		return err
	}
	f.o.OnStep("edge")
	if err := f.onFreePorts("edge", func() error { return f.startEdge(ctx) }); err != nil {
		return fmt.Errorf("edge: %w", err)
	}
	f.Info.Cells = nil
	for _, s := range specs {
		f.Info.Cells = append(f.Info.Cells, string(s.Cell))
	}
	f.o.OnStep("cells " + strings.Join(f.Info.Cells, ", "))
	if err := f.startCells(ctx, specs); err != nil {
		return err
	}
	f.reconcile()
	b, err := json.MarshalIndent(f.Info, "", "  ")
	if err != nil {
		return err
	}
	if err := files.Write(f.Layout.Info(), append(b, '\n'), 0o600); err != nil {
		return err
	}
	f.o.OnStep("waiting until every cell is ready")
	return f.waitReady(ctx, specs)
}

// Close ends every process and leaves the state folder as it is: first the edge,
// then the cells, which still tell the directory that they leave, then it.
func (f *Fleet) Close() {
	f.end()
	f.keepers.Wait()
	if f.Procs != nil {
		f.Procs.Remove("edge")
		var wg sync.WaitGroup
		for _, name := range f.Procs.Names() {
			if name != "directory" {
				wg.Go(func() { f.Procs.Remove(name) })
			}
		}
		wg.Wait()
		f.Procs.Close()
	}
	if f.cells != nil {
		f.cells.Close()
		f.source.CloseIdleConnections()
	}
	_ = os.Remove(f.Layout.Info())
	if f.release != nil {
		f.release()
		f.release = nil
	}
}

// Cluster returns the Postgres server of a cell, or nil.
func (f *Fleet) Cluster(cell string) *pgcluster.Cluster { return f.cells.Cluster(cells.CellID(cell)) }

// certificates makes the CA and one certificate for each member of the fleet, as
// far as they are not there yet.
func (f *Fleet) certificates() error {
	ca, err := pki.LoadAuthority(f.Layout.PKI(), pki.Options{})
	if errors.Is(err, fs.ErrNotExist) {
		ca, err = pki.NewAuthority(f.Layout.PKI(), f.Config.Name, pki.Options{})
	}
	if err != nil {
		return err
	}
	if ca.Fleet() != f.Config.Name {
		return fmt.Errorf("%s belongs to the fleet %s, not %s; choose another state folder with --fleet", f.Layout.Dir, ca.Fleet(), f.Config.Name)
	}
	if _, _, err := pki.EnsureReceiptKey(f.Layout.PKI()); err != nil {
		return err
	}
	for _, id := range []channel.Identity{{Role: channel.RoleDirectory, Name: "main"}, {Role: channel.RoleEdge, Name: "main"}, {Role: channel.RoleProvisioner, Name: "main"}} {
		if err := process.Certificate(ca, f.Layout.Certs(id.Name), id); err != nil {
			return err
		}
	}
	return nil
}

func (f *Fleet) certFiles(role channel.Role, name string) (cert, key string) {
	return process.CertFiles(f.Layout.Certs(name), channel.Identity{Role: role, Name: name})
}

// channelArgs are the flags that every process of ours takes for its certificate.
func (f *Fleet) channelArgs(role channel.Role, name string) []string {
	cert, key := f.certFiles(role, name)
	return []string{"--channel-ca", filepath.Join(f.Layout.PKI(), pki.CACertFile), "--channel-cert", cert, "--channel-key", key,
		"--channel-revoked", filepath.Join(f.Layout.PKI(), pki.RevokedFile)}
}

// onFreePorts runs start, which starts the process on new ports, again when one of
// them was taken by somebody else in between.
func (f *Fleet) onFreePorts(name string, start func() error) error {
	for try := 1; ; try++ {
		err := start()
		if try == 3 || !errors.Is(err, errPortTaken) {
			return err
		}
		f.Procs.Remove(name)
	}
}

var errPortTaken = errors.New("the address is already in use")

// waitUp waits until the process answers at the URL, or has ended because its port is taken.
func (f *Fleet) waitUp(ctx context.Context, name, url string) error {
	p := f.Procs.Proc(name)
	return poll(ctx, func(ctx context.Context) (bool, string, error) {
		if p.Restarts() > 0 && process.PortTaken(p.Output(0)) {
			return false, "", errPortTaken
		}
		return askOK(ctx, url, p.Log())
	})
}

func (f *Fleet) startDirectory(ctx context.Context) error {
	for _, at := range []struct {
		to     *string
		scheme string
	}{{&f.Info.Operator, "http://"}, {&f.Info.Channel, "https://"}} {
		addr, err := freeport.Addr()
		if err != nil {
			return err
		}
		*at.to = at.scheme + addr
	}
	args := append([]string{f.o.Cell, "directory", "serve",
		"--state", f.Layout.Directory(),
		"--operator-listen", strings.TrimPrefix(f.Info.Operator, "http://"),
		"--channel-listen", strings.TrimPrefix(f.Info.Channel, "https://"),
		"--operator-credential-file", f.Layout.Credential(),
		"--receipt-key", filepath.Join(f.Layout.PKI(), pki.ReceiptKeyFile),
	}, f.channelArgs(channel.RoleDirectory, "main")...)
	if _, err := f.Procs.Start(supervise.Spec{Name: "directory", Args: append(args, f.o.DirectoryArgs...), Env: []string{processMark + "directory"}}); err != nil {
		return err
	}
	return f.waitUp(ctx, "directory", f.Info.Operator+"/readyz")
}

func (f *Fleet) startEdge(ctx context.Context) error {
	admin, err := freeport.Addr()
	if err != nil {
		return err
	}
	f.Info.EdgeAdmin = "http://" + admin
	extractors, err := json.Marshal(f.Config.Extractors)
	if err != nil {
		return err
	}
	args := append([]string{f.o.Cell, "router", "serve",
		"--listen", strings.TrimPrefix(f.Info.Edge, "http://"),
		"--admin-listen", strings.TrimPrefix(f.Info.EdgeAdmin, "http://"),
		"--directory", "https://" + f.o.via("edge", "directory", strings.TrimPrefix(f.Info.Channel, "https://")),
		"--state", f.Layout.Edge(),
		"--admission-key-file", f.Layout.AdmissionKey(),
		"--extractors", string(extractors),
		"--default-cell", f.Config.DefaultCell,
		"--max-body", strconv.FormatInt(max(0, f.Config.MaxBody), 10),
	}, f.channelArgs(channel.RoleEdge, "main")...)
	if _, err = f.Procs.Start(supervise.Spec{Name: "edge", Args: append(args, f.o.EdgeArgs...), Env: []string{processMark + "edge"}}); err != nil {
		return err
	}
	return f.waitUp(ctx, "edge", f.Info.EdgeAdmin+"/livez")
}

// waitReady waits for the edge, and until each cell serves with its processes ready.
func (f *Fleet) waitReady(ctx context.Context, specs []provision.Spec) error {
	if err := waitOK(ctx, f.Info.EdgeAdmin+"/readyz", f.Procs.Proc("edge").Log()); err != nil {
		return fmt.Errorf("edge: %w", err)
	}
	return poll(ctx, func(ctx context.Context) (bool, string, error) {
		if err := f.crashing(); err != nil {
			return false, "", err
		}
		ready, serves, err := f.serving(ctx)
		if err != nil {
			return false, err.Error(), nil
		}
		var missing []string
		for _, s := range specs {
			if ready[s.Cell] < s.Replicas {
				missing = append(missing, fmt.Sprintf("%s has %d of %d processes ready (log: %s)", s.Cell, ready[s.Cell], s.Replicas,
					filepath.Join(f.Layout.Logs(), string(s.Cell)+"-1.log")))
			} else if !serves[s.Cell] {
				missing = append(missing, fmt.Sprintf("%s does not serve yet", s.Cell))
			}
		}
		sort.Strings(missing)
		return len(missing) == 0, strings.Join(missing, "; "), nil
	})
}

// crashing reports a process that ended by itself several times before the fleet
// was ready: waiting longer will not help.
func (f *Fleet) crashing() error {
	for _, name := range f.Procs.Names() {
		p := f.Procs.Proc(name)
		if p == nil || p.Restarts() < 4 {
			continue
		}
		b, _ := os.ReadFile(p.Log())
		lines := strings.Split(strings.TrimSpace(string(b)), "\n")
		return fmt.Errorf("%s ended %d times by itself; it last said: %s (log: %s)", name, p.Restarts(), lines[len(lines)-1], p.Log())
	}
	return nil
}

// poll asks until the answer is yes or an error, at most 60 s; the reason of the
// last no is in the error.
func poll(ctx context.Context, ask func(ctx context.Context) (ok bool, why string, err error)) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, why, err := ask(ctx)
		if ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not ready: %s", why)
		case <-tick.C:
		}
	}
}

func waitOK(ctx context.Context, url, log string) error {
	return poll(ctx, func(ctx context.Context) (bool, string, error) { return askOK(ctx, url, log) })
}

func askOK(ctx context.Context, url, log string) (ok bool, why string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false, "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false, err.Error() + "; see " + log, nil
	}
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK, fmt.Sprintf("%s answers %s; see %s", url, resp.Status, log), nil
}

// freeAddr checks that the address can be listened on, and chooses the port if it is 0.
func freeAddr(addr string) (string, error) {
	if addr == "127.0.0.1:0" || addr == "localhost:0" {
		return freeport.Addr()
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}
