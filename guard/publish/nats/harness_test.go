// SPDX-License-Identifier: Apache-2.0

package nats_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/publish"
	"github.com/cloister-dev/cloister/guard/publish/nats"
	"github.com/cloister-dev/cloister/guard/publish/publishertest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// The server's clock of its time stamps runs as long as the process.
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.init.0.func1"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

// broker is a NATS server with JetStream on disk.
type broker struct {
	dir     string
	port    int
	srv     *server.Server
	link    *publishertest.Link
	nc      *natsgo.Conn
	atomic  bool
	changed func(*jetstream.StreamConfig)
}

func open(ctx context.Context, change func(*jetstream.StreamConfig)) (*broker, error) {
	dir, err := os.MkdirTemp("", "publish-nats-")
	if err != nil {
		return nil, err
	}
	b := &broker{dir: dir, port: -1, changed: change}
	if err := b.Start(); err != nil {
		return nil, err
	}
	if b.link, err = publishertest.NewLink("127.0.0.1:" + strconv.Itoa(b.port)); err != nil {
		return nil, err
	}
	js, err := jetstream.New(b.nc)
	if err != nil {
		return nil, err
	}
	if change != nil {
		cfg := jetstream.StreamConfig{Name: "CELL_EVENTS", Subjects: []string{"cell.events.*"}, Storage: jetstream.FileStorage}
		change(&cfg)
		if _, err := js.CreateStream(ctx, cfg); err != nil {
			return nil, err
		}
	}
	return b, nil
}

func (b *broker) Start() error {
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: b.port, JetStream: true, StoreDir: b.dir, NoLog: true, NoSigs: true})
	if err != nil {
		return err
	}
	srv.Start()
	if !srv.ReadyForConnections(20 * time.Second) {
		return errors.New("the server is not ready")
	}
	u, err := url.Parse(srv.ClientURL())
	if err != nil {
		return err
	}
	if b.port, err = strconv.Atoi(u.Port()); err != nil {
		return err
	}
	b.srv = srv
	b.nc, err = natsgo.Connect(srv.ClientURL(), natsgo.NoReconnect())
	return err
}

func (b *broker) Stop() error {
	b.nc.Close()
	b.srv.Shutdown()
	b.srv.WaitForShutdown()
	return nil
}

func (b *broker) Close() {
	b.link.Close()
	_ = b.Stop()
	_ = os.RemoveAll(b.dir)
}

func (b *broker) Link() *publishertest.Link { return b.link }

func (b *broker) Publisher(context.Context) (publishertest.Publisher, error) {
	return nats.New(nats.Config{URL: "nats://" + b.link.Addr(), Create: b.changed == nil, Settle: time.Second, Logger: slog.New(slog.DiscardHandler)})
}

func (b *broker) Log(ctx context.Context, tenant cells.TenantID) ([]guard.Event, error) {
	js, err := jetstream.New(b.nc)
	if err != nil {
		return nil, err
	}
	s, err := js.Stream(ctx, "CELL_EVENTS")
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []guard.Event
	for seq := uint64(1); ; {
		m, err := s.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(nats.Subject("cell.events", tenant)))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		e, err := publish.Decode(m.Data)
		if err != nil {
			return nil, err
		}
		for k, want := range map[string]string{publish.HeaderID: e.ID, publish.HeaderTenant: string(tenant), publish.HeaderSeq: fmt.Sprint(e.Seq), publish.HeaderEpoch: fmt.Sprint(e.Epoch), publish.HeaderCell: string(e.Cell), "Nats-Msg-Id": e.ID} {
			if got := m.Header.Get(k); got != want {
				return nil, fmt.Errorf("header %s is %q, want %q", k, got, want)
			}
		}
		out = append(out, e)
		seq = m.Sequence + 1
	}
}

func harness(change func(*jetstream.StreamConfig)) publishertest.Harness {
	return publishertest.Harness{
		Once: true,
		Open: func(ctx context.Context) (publishertest.Broker, error) { return open(ctx, change) },
	}
}
