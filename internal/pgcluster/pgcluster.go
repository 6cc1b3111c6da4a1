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
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/internal/freeport"
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
	// Env is added to the server's environment.
	Env []string
	// NoSync turns fsync off; only for tests that do not crash the server.
	NoSync bool
}

// Cluster is a running server. Its methods may be called at the same time.
type Cluster struct {
	opts     Options
	bin      string
	cred     *syscall.Credential
	log      string
	password string
	// Port is where it listens; it stays when the server is started again.
	Port int

	mu      sync.Mutex // guards what follows
	cmd     *exec.Cmd
	done    chan struct{} // closed when cmd has ended
	stopped bool          // it was ended on purpose
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
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.Chmod(o.Dir, 0o700); err != nil {
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
	if err := c.initialise(ctx); err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		if c.Port = o.Port; c.Port == 0 {
			if c.Port, err = freeport.Port(); err != nil {
				return nil, err
			}
		}
		if err = c.Restart(ctx); err == nil || o.Port != 0 || try == 3 || !strings.Contains(err.Error(), "could not bind") {
			return c, err
		}
	}
}

// Restart starts the server on the same data; it must not be running. Of two calls
// at the same time the later fails.
func (c *Cluster) Restart(ctx context.Context) error {
	args := []string{"-D", filepath.Join(c.opts.Dir, "data"), "-k", c.opts.Dir, "-p", strconv.Itoa(c.Port)}
	settings := append([]string{"listen_addresses=127.0.0.1", "wal_level=logical", "max_replication_slots=64", "max_wal_senders=64",
		"max_connections=200", "unix_socket_permissions=0700", "log_min_messages=warning"}, c.opts.Settings...)
	if c.opts.NoSync {
		settings = append(settings, "fsync=off", "full_page_writes=off")
	}
	for _, s := range settings {
		args = append(args, "-c", s)
	}
	done, err := c.run(context.WithoutCancel(ctx), args)
	if err != nil {
		return err
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := pgx.Connect(ctx, c.URL("postgres"))
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-done:
			tail, _ := os.ReadFile(c.log)
			return fmt.Errorf("postgres ended at start: %s", bytes.TrimSpace(tail[max(0, len(tail)-800):]))
		case <-ctx.Done():
			_ = c.Stop()
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// run starts the server's process; done is closed when it has ended.
func (c *Cluster) run(ctx context.Context, args []string) (done chan struct{}, err error) {
	logf, err := os.OpenFile(c.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer logf.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done != nil {
		select {
		case <-c.done:
		default:
			return nil, errors.New("postgres: it runs already")
		}
	}
	cmd := c.command(ctx, "postgres", args...)
	cmd.Stdout, cmd.Stderr = logf, logf
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("postgres: %w", err)
	}
	c.cmd, c.done, c.stopped = cmd, make(chan struct{}), false
	go wait(cmd, c.done)
	return c.done, nil
}

func wait(cmd *exec.Cmd, done chan struct{}) { _ = cmd.Wait(); close(done) }

// PID is the server's process id, or 0 when it does not run.
func (c *Cluster) PID() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cmd == nil {
		return 0
	}
	select {
	case <-c.done:
		return 0
	default:
		return c.cmd.Process.Pid
	}
}

// Supervise starts the server again, on the same port, whenever it ends by itself,
// until ctx ends. What [Cluster.Stop] and [Cluster.Kill] end stays ended. tell hears
// of each end and of each start that follows; err is nil for a good start.
func (c *Cluster) Supervise(ctx context.Context, tell func(what string, err error)) {
	const least, most = 200 * time.Millisecond, 5 * time.Second
	poll := time.NewTicker(100 * time.Millisecond)
	defer poll.Stop()
	pause := least
	for {
		select {
		case <-ctx.Done():
			return
		case <-poll.C:
		}
		c.mu.Lock()
		ended := !c.stopped
		select {
		case <-c.done:
		default:
			ended = false
		}
		c.mu.Unlock()
		if !ended {
			continue
		}
		tell("Postgres ended; starting it again", nil)
		for {
			sctx, cancel := context.WithTimeout(ctx, time.Minute)
			err := c.Restart(sctx)
			cancel()
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				tell("Postgres runs again", nil)
				pause = least
				break
			}
			tell("Postgres does not start; trying again", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
			pause = min(2*pause, most)
		}
	}
}

// URL returns the connection string of a database, as the superuser "postgres". It
// has the password in it: give it to no command line and no log.
func (c *Cluster) URL(database string) string {
	u := url.URL{Scheme: "postgres", User: url.UserPassword("postgres", c.password), Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(c.Port)), Path: database, RawQuery: "sslmode=disable"}
	return u.String()
}

// PublicURL is [Cluster.URL] without the password, for a client that has the file of
// [Cluster.PassFile] in $PGPASSFILE.
func (c *Cluster) PublicURL(database string) string {
	u := url.URL{Scheme: "postgres", User: url.User("postgres"), Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(c.Port)), Path: database, RawQuery: "sslmode=disable"}
	return u.String()
}

// PassFile is the content of a password file (PGPASSFILE) for this server.
func (c *Cluster) PassFile() []byte { return []byte("127.0.0.1:*:*:postgres:" + c.password + "\n") }

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
	c.mu.Lock()
	cmd, done := c.cmd, c.done
	c.stopped = true
	c.mu.Unlock()
	if cmd == nil {
		return nil
	}
	_ = cmd.Process.Signal(sig)
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		_ = cmd.Process.Kill()
		<-done
	}
	return nil
}

func (c *Cluster) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, name), args...)
	cmd.Dir = c.opts.Dir
	cmd.Env = append(append(os.Environ(), "LC_ALL=C"), c.opts.Env...)
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
