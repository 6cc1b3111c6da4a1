// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/guard/publish"
	"github.com/cloister-dev/cloister/guard/publish/nats"
)

// startNATS starts a server with JetStream in this process.
func startNATS(t *testing.T, dir string, port int) *server.Server {
	t.Helper()
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: dir, NoLog: true, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	if !srv.ReadyForConnections(20 * time.Second) {
		t.Fatal("the NATS server is not ready")
	}
	return srv
}

// A tenant is moved to and fro while it is written to, its events are published to
// a real broker by four processes, a process is killed and the broker restarts:
// what the stream has in the end is every event once, in order.
func TestEventsArePublishedOnceThroughMoves(t *testing.T) { stores(t, publishedOnce) }

func publishedOnce(t *testing.T, store string) {
	dir := t.TempDir()
	srv := startNATS(t, dir, -1)
	defer func() { srv.Shutdown(); srv.WaitForShutdown() }()
	var port int
	if _, err := fmt.Sscanf(srv.ClientURL(), "nats://127.0.0.1:%d", &port); err != nil {
		t.Fatal(err)
	}
	cfg := fleet.Config{Store: store, Cells: []fleet.Cell{{Name: "cell-a", Replicas: 2}, {Name: "cell-b", Replicas: 2}}}
	cfg.Service.Command = []string{"--publish", srv.ClientURL() + "/EVENTS?prefix=ev&create=true"}
	e := start(t, cfg)
	moving, other := e.tenant("acme.example", "cell-a"), e.tenant("other", "cell-a")
	stops := []func() load.Tally{
		e.hammer(&load.Hammer{Client: moving, Clients: 3, Keys: 5, Pause: 3 * time.Millisecond}),
		e.hammer(&load.Hammer{Client: other, Clients: 1, Keys: 3, Pause: 5 * time.Millisecond}),
	}
	for i, to := range []string{"cell-b", "cell-a", "cell-b"} {
		if i == 1 {
			// It goes away in the middle of everything, and comes back with what it had.
			srv.Shutdown()
			srv.WaitForShutdown()
			srv = startNATS(t, dir, port)
		}
		mv := e.settle(e.startMove(moving.Tenant, to, fmt.Sprintf("op-%d", i)).ID)
		if mv.State != api.MoveDone {
			t.Fatalf("move to %s: %s: %s", to, mv.State, mv.Reason)
		}
		if i == 0 {
			e.kill("cell-b-1")
		}
	}
	for _, stop := range stops {
		stop()
	}
	nc, err := natsgo.Connect(srv.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), "EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*load.Client{moving, other} {
		subject := nats.Subject("ev", cells.TenantID(c.Tenant))
		item, err := c.Set(t.Context(), "last", "key", 1, -1)
		if err != nil {
			t.Fatal(err)
		}
		e.eventually("the last event is in the stream", 30*time.Second, func() bool {
			m, err := stream.GetLastMsgForSubject(t.Context(), subject)
			return err == nil && m.Header.Get(publish.HeaderSeq) == fmt.Sprint(item.EventSeq)
		})
		checkStream(t, stream, subject, item.EventSeq)
	}
}

// checkStream holds that a subject has events 1 to n, once and in order, and that
// epochs never go back.
func checkStream(t *testing.T, s jetstream.Stream, subject string, n uint64) {
	t.Helper()
	seen := map[cells.CellID]int{}
	var last uint64
	var epoch cells.Epoch
	for at := uint64(1); ; {
		m, err := s.GetMsg(context.WithoutCancel(t.Context()), at, jetstream.WithGetMsgSubject(subject))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		ev, err := publish.Decode(m.Data)
		if err != nil {
			t.Fatal(err)
		}
		if uint64(ev.Seq) != last+1 || ev.Epoch < epoch {
			t.Fatalf("%s: event %d at epoch %d came after %d at %d", subject, ev.Seq, ev.Epoch, last, epoch)
		}
		last, epoch = uint64(ev.Seq), ev.Epoch
		seen[ev.Cell]++
		at = m.Sequence + 1
	}
	if last != n {
		t.Errorf("%s: the stream ends with event %d, want %d", subject, last, n)
	}
	t.Logf("%s: %d events, by cells %v", subject, n, seen)
}
