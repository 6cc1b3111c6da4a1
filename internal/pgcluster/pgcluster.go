// SPDX-License-Identifier: Apache-2.0

package pgcluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// Options describes a cluster.
type Options struct {
	// Dir holds the data and the socket; created if missing.
	Dir string
	// Port on 127.0.0.1; 0 picks a free one at every start.
	Port int
	// Settings are extra lines "name=value" for the server; wal_level=logical and
	// generous slots are set already.
	Settings []string
	// NoSync turns fsync off; only for tests that do not crash the server.
	NoSync bool
}

// Cluster is a running server.
type Cluster struct {
	opts Options
	bin  string
	cred *syscall.Credential
	cmd  *exec.Cmd
	done chan struct{}
	log  string
	Port int
}

// ErrNoPostgres says that the machine has no Postgres server binaries.
var ErrNoPostgres = errors.New("no Postgres server found; install it with: apt-get install -y postgresql")

// BinDir returns the folder of initdb and postgres: the newest that Debian
// installed, or the one that $CELL_PG_BIN names.
func BinDir() (string, error) {
	if d := os.Getenv("CELL_PG_BIN"); d != "" {
		return d, nil
	}
	dirs, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	slices.SortFunc(dirs, func(a, b string) int { return versionOf(b) - versionOf(a) })
	for _, d := range dirs {
		return filepath.Dir(d), nil
	}
	if p, err := exec.LookPath("initdb"); err == nil {
		return filepath.Dir(p), nil
	}
	return "", ErrNoPostgres
}

func versionOf(initdb string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(initdb))))
	return n
}

// Start initialises the cluster if it is new, starts it, and returns once it
// answers. The server is a child of this process and dies with it.
func Start(ctx context.Context, o Options) (*Cluster, error) {
	bin, err := BinDir()
	if err != nil {
		return nil, err
	}
	c := &Cluster{opts: o, bin: bin, log: filepath.Join(o.Dir, "server.log")}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, err
	}
	if os.Geteuid() == 0 {
		if c.cred, err = unprivileged(); err != nil {
			return nil, err
		}
		if err := chownTree(o.Dir, c.cred); err != nil {
			return nil, err
		}
	}
	data := filepath.Join(o.Dir, "data")
	if _, err := os.Stat(filepath.Join(data, "PG_VERSION")); errors.Is(err, fs.ErrNotExist) {
		cmd := c.command(ctx, "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions")
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("initdb: %w: %s", err, bytes.TrimSpace(out))
		}
	}
	return c, c.Restart(ctx)
}

// Standby makes a hot standby that streams from the cluster, in a folder of its own,
// and starts it. The caller stops it.
func (c *Cluster) Standby(ctx context.Context, dir string) (*Cluster, error) {
	s := &Cluster{opts: Options{Dir: dir, Settings: c.opts.Settings, NoSync: c.opts.NoSync}, bin: c.bin, cred: c.cred, log: filepath.Join(dir, "server.log")}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if s.cred != nil {
		if err := chownTree(dir, s.cred); err != nil {
			return nil, err
		}
	}
	cmd := s.command(ctx, "pg_basebackup", "-D", filepath.Join(dir, "data"), "-R", "-X", "stream", "-c", "fast", "--no-sync",
		"-h", "127.0.0.1", "-p", strconv.Itoa(c.Port), "-U", "postgres")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("pg_basebackup: %w: %s", err, bytes.TrimSpace(out))
	}
	return s, s.Restart(ctx)
}

// Restart starts the server on the same data; it must not be running.
func (c *Cluster) Restart(ctx context.Context) error {
	if c.opts.Port == 0 {
		p, err := freePort()
		if err != nil {
			return err
		}
		if c.Port == 0 {
			c.Port = p
		}
	} else {
		c.Port = c.opts.Port
	}
	args := []string{"-D", filepath.Join(c.opts.Dir, "data"), "-k", c.opts.Dir, "-p", strconv.Itoa(c.Port)}
	settings := append([]string{"listen_addresses=127.0.0.1", "wal_level=logical", "max_replication_slots=64", "max_wal_senders=64",
		"max_connections=200", "unix_socket_permissions=0700", "log_min_messages=warning"}, c.opts.Settings...)
	if c.opts.NoSync {
		settings = append(settings, "fsync=off", "full_page_writes=off")
	}
	for _, s := range settings {
		args = append(args, "-c", s)
	}
	logf, err := os.OpenFile(c.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer logf.Close()
	c.cmd = c.command(context.WithoutCancel(ctx), "postgres", args...)
	c.cmd.Stdout, c.cmd.Stderr = logf, logf
	if err := c.cmd.Start(); err != nil {
		return fmt.Errorf("postgres: %w", err)
	}
	c.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) { _ = cmd.Wait(); close(done) }(c.cmd, c.done)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := pgx.Connect(ctx, c.URL("postgres"))
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-c.done:
			tail, _ := os.ReadFile(c.log)
			return fmt.Errorf("postgres ended at start: %s", bytes.TrimSpace(tail[max(0, len(tail)-800):]))
		case <-ctx.Done():
			_ = c.Stop()
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// URL returns the connection string of a database, as the superuser "postgres".
func (c *Cluster) URL(database string) string {
	u := url.URL{Scheme: "postgres", User: url.User("postgres"), Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(c.Port)), Path: database, RawQuery: "sslmode=disable"}
	return u.String()
}

// CreateDatabase makes a database if there is none of that name.
func (c *Cluster) CreateDatabase(ctx context.Context, name string) error {
	conn, err := pgx.Connect(ctx, c.URL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var there bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name).Scan(&there); err != nil || there {
		return err
	}
	_, err = conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize())
	return err
}

// Stop shuts the server down fast (clients are cut off, nothing is lost) and
// waits for it.
func (c *Cluster) Stop() error { return c.end(syscall.SIGINT) }

// Kill ends the server as a crash does.
func (c *Cluster) Kill() error { return c.end(syscall.SIGQUIT) }

func (c *Cluster) end(sig syscall.Signal) error {
	if c.cmd == nil || c.cmd.Process == nil {
		return nil
	}
	_ = c.cmd.Process.Signal(sig)
	select {
	case <-c.done:
	case <-time.After(20 * time.Second):
		_ = c.cmd.Process.Kill()
		<-c.done
	}
	return nil
}

func (c *Cluster) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, name), args...)
	cmd.Dir = c.opts.Dir
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.cred, Pdeathsig: syscall.SIGINT, Setpgid: true}
	return cmd
}

func unprivileged() (*syscall.Credential, error) {
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err1 == nil && err2 == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, errors.New("running as root, and there is no user postgres or nobody to run Postgres as")
}

func chownTree(dir string, cred *syscall.Credential) error {
	return filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(p, int(cred.Uid), int(cred.Gid))
	})
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
