// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/internal/freeport"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/postgres"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// start runs the program until the test ends and returns its address.
func start(t *testing.T, args ...string) string {
	t.Helper()
	addr, err := freeport.Addr()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done, log := make(chan int, 1), &bytes.Buffer{}
	go func() { done <- Main(ctx, append([]string{"--listen", addr}, args...), log) }()
	t.Cleanup(func() {
		cancel()
		if code := <-done; code != 0 {
			t.Errorf("ended with %d:\n%s", code, log)
		}
	})
	deadline := time.Now().Add(60 * time.Second)
	for {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			_ = c.Close()
			return addr
		}
		if time.Now().After(deadline) {
			t.Fatalf("it does not listen: %v", err)
		}
		<-time.After(20 * time.Millisecond)
	}
}

// A process on Postgres proves to whoever wrote the nonces that it uses the same
// database, and says its id on its own port; without CELL_PROBE_PORT only the latter.
func TestProbe(t *testing.T) {
	url := pgtest.DB(t)
	port, err := freeport.Port()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("CELL_PROBE_PORT", fmt.Sprint(port))
	own := "http://" + start(t, "--store", "postgres", "--dsn", url)
	listener := fmt.Sprintf("http://127.0.0.1:%d", port)

	pg, err := postgres.Open(t.Context(), postgres.Config{URL: url, Own: []string{"cell"}})
	if err != nil {
		t.Fatal(err)
	}
	defer pg.Close()
	operator, err := stores.NewSet(pg)
	if err != nil {
		t.Fatal(err)
	}
	d, err := operator.Deployment(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := probe.NewClient(probe.ClientConfig{Timeout: 30 * time.Second})
	if got, err := c.DeploymentID(t.Context(), own); err != nil || got != d {
		t.Errorf("its own port: %s, %v; want %s", got, err, d)
	}
	if _, err := c.Read(t.Context(), own); !errors.Is(err, probe.ErrRefused) {
		t.Errorf("its own port, in full: %v, want ErrRefused", err)
	}
	nonces, err := operator.WriteNonces(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Check(t.Context(), listener, probe.Want{Deployment: d, Nonces: nonces}); err != nil {
		t.Errorf("the listener: %v", err)
	}
	if empty, holds, err := operator.Empty(t.Context()); err != nil || !empty {
		t.Errorf("a new deployment holds %s, %v", holds, err)
	}

	t.Setenv("CELL_PROBE_PORT", "0")
	second := "http://" + start(t, "--store", "postgres", "--dsn", url)
	if got, err := c.DeploymentID(t.Context(), second); err != nil || got != d {
		t.Errorf("a second process: %s, %v; want %s", got, err, d)
	}
}

func TestProbeRefuses(t *testing.T) {
	for name, env := range map[string][2]string{
		"SQLite":     {"CELL_PROBE_PORT", "8090"},
		"a bucket":   {"CELL_S3_URL", "https://s3.example/bucket"},
		"a word":     {"CELL_PROBE_PORT", "on"},
		"no address": {"CELL_CLICKHOUSE_DATABASE", "db"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(env[0], env[1])
			log := &bytes.Buffer{}
			if code := Main(t.Context(), []string{"--listen", "127.0.0.1:0", "--dsn", t.TempDir() + "/m.db"}, log); code != 1 || !strings.Contains(log.String(), env[0]) {
				t.Errorf("%d: %s", code, log)
			}
		})
	}
}
