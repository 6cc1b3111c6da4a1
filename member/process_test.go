// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	guardsqlite "github.com/cloister-dev/cloister/guard/sqlite"
	"github.com/cloister-dev/cloister/transfer"
	transfersqlite "github.com/cloister-dev/cloister/transfer/sqlite"
)

// service is a small real service: one table, one guarded write.
type service struct {
	m     *Member
	db    *sql.DB
	guard *guardsqlite.Guard
	move  *transfersqlite.Store
	srv   *http.Server
	done  chan struct{}
	url   string
}

var serviceTables = []guard.Table{{Name: "items", TenantColumn: "tenant"}}

// startService starts a process's part of the service on the cell's file.
func startService(ctx context.Context, cfg Config, file string, log *slog.Logger, topts []transfer.Option, opts ...Option) (_ *service, err error) {
	s := &service{done: make(chan struct{})}
	defer func() {
		if err != nil {
			s.stop()
		}
	}()
	s.db, err = sql.Open("sqlite", "file:"+file+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_txlock=immediate&_pragma=synchronous(FULL)")
	if err != nil {
		return s, err
	}
	if _, err = s.db.ExecContext(ctx, "CREATE TABLE IF NOT EXISTS items (tenant TEXT NOT NULL, k INTEGER NOT NULL, epoch INTEGER NOT NULL, PRIMARY KEY (tenant, k)) WITHOUT ROWID"); err != nil {
		return s, err
	}
	if s.guard, err = guardsqlite.New(s.db, guardsqlite.WithCell(cfg.Cell), guardsqlite.WithLogger(log)); err != nil {
		return s, err
	}
	if err = s.guard.Install(ctx, serviceTables); err != nil {
		return s, err
	}
	if s.move, err = transfersqlite.Open(ctx, transfersqlite.Config{Path: file, Keeper: s.guard, Admit: s.guard.AdmitClosed, Tables: serviceTables}); err != nil {
		return s, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return s, err
	}
	s.url = "http://" + l.Addr().String()
	cfg.ServiceURL = s.url
	opts = append([]Option{WithLogger(log), WithStore(Store{Keeper: s.guard, Agent: transfer.New(s.move, s.move, topts...), Tables: serviceTables, Engine: "sqlite"})}, opts...)
	if s.m, err = Join(ctx, cfg, opts...); err != nil {
		l.Close()
		return s, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /add", s.add)
	s.srv = &http.Server{Handler: s.m.Handler(mux), ReadHeaderTimeout: 5 * time.Second}
	go func() { defer close(s.done); _ = s.srv.Serve(l) }()
	return s, nil
}

func (s *service) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if s.srv != nil {
		_ = s.srv.Close()
		<-s.done
	}
	if s.m != nil {
		_ = s.m.Close(ctx)
	}
	if s.move != nil {
		_ = s.move.Close()
	}
	if s.guard != nil {
		s.guard.Close()
	}
	if s.db != nil {
		_ = s.db.Close()
	}
}

// add writes one row and one event.
func (s *service) add(w http.ResponseWriter, r *http.Request) {
	k := r.FormValue("k")
	a, _ := cells.AdmissionFromContext(r.Context())
	var seq cells.EventSeq
	err := s.guard.InTx(r.Context(), nil, func(ctx context.Context, tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "INSERT INTO items (tenant, k, epoch) VALUES (?, ?, ?)", string(a.Tenant), k, int64(a.Epoch)); err != nil {
			return err
		}
		var err error
		seq, err = s.guard.Emit(ctx, tx, "added", map[string]string{"k": k})
		return err
	})
	switch {
	case errors.Is(err, cells.ErrFenced):
		http.Error(w, err.Error(), http.StatusConflict)
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	default:
		fmt.Fprint(w, seq)
	}
}

const (
	envFile = "MEMBER_TEST_FILE"
	envKill = "MEMBER_TEST_KILL"
)

// runIfProcess turns the test binary into a process of the service.
func runIfProcess() {
	if os.Getenv(envFile) == "" {
		return
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if err := processMain(log); err != nil {
		log.Error("process", "err", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func processMain(log *slog.Logger) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	cfg, on, err := FromEnv()
	if err != nil || !on {
		return fmt.Errorf("on %v: %w", on, err)
	}
	var topts []transfer.Option
	if at := os.Getenv(envKill); at != "" {
		topts = append(topts, transfer.WithFault(func(point string) error {
			if point == at {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
			return nil
		}))
	}
	s, err := startService(ctx, cfg, os.Getenv(envFile), log, topts, WithReconcile(100*time.Millisecond, time.Minute))
	if err != nil {
		return err
	}
	defer s.stop()
	if _, err := fmt.Println(s.url); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// process is a process of the service that a test can kill.
type process struct {
	cmd      *exec.Cmd
	instance string
	exited   chan struct{}
}

// spawn starts a process of the cell and waits until it is ready.
func (p *plane) spawn(t testing.TB, cell cells.CellID, instance, file, kill string) *process {
	t.Helper()
	cfg := p.config(t, cell)
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(),
		"CELL_ID="+string(cell), "CELL_FLEET=test", "CELL_INSTANCE="+instance, "CELL_DIRECTORY_URL="+cfg.DirectoryURL,
		"CELL_CHANNEL_CA="+cfg.ChannelCA, "CELL_CHANNEL_CERT="+cfg.ChannelCert, "CELL_CHANNEL_KEY="+cfg.ChannelKey,
		"CELL_SERVICE_URL=http://127.0.0.1:1", "CELL_ADMISSION_KEY_FILE="+writeKey(t, cell), "CELL_STATE_DIR="+t.TempDir(),
		envFile+"="+file, envKill+"="+kill)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pr := &process{cmd: cmd, instance: instance, exited: make(chan struct{})}
	go func() { defer close(pr.exited); _ = cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-pr.exited
	})
	p.waitBeat(t, instance, func(h Heartbeat) bool { return h.Instance == instance && h.Ready })
	return pr
}

func (pr *process) kill() {
	_ = pr.cmd.Process.Kill()
	<-pr.exited
}

// rowsOf reads what a cell's file holds of the tenant.
func rowsOf(t testing.TB, file string, tenant cells.TenantID) (keys map[int]int64, events []struct {
	Seq   int64
	Key   string
	Epoch int64
}) {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+file+"?mode=ro&_pragma=busy_timeout(10000)")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := db.Query("SELECT k, epoch FROM items WHERE tenant = ?", string(tenant))
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	keys = map[int]int64{}
	for rows.Next() {
		var k int
		var e int64
		if err := rows.Scan(&k, &e); err != nil {
			t.Fatal(err)
		}
		keys[k] = e
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	g, err := guardsqlite.New(db)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for after := cells.EventSeq(0); ; {
		page, err := g.Events(context.Background(), tenant, after, 1000)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			return keys, events
		}
		for _, e := range page {
			var payload struct{ K string }
			if err := json.Unmarshal(e.Payload, &payload); err != nil {
				t.Fatal(err)
			}
			events = append(events, struct {
				Seq   int64
				Key   string
				Epoch int64
			}{int64(e.Seq), payload.K, int64(e.Epoch)})
			after = e.Seq
		}
	}
}
