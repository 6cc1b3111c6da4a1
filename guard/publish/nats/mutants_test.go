// SPDX-License-Identifier: Apache-2.0

package nats_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/publish"
	"github.com/cloister-dev/cloister/guard/publish/nats"
	"github.com/cloister-dev/cloister/guard/publish/publishertest"
)

// mutant is a publisher with a fault.
type mutant struct {
	publishertest.Publisher
	publish func(p publishertest.Publisher, ctx context.Context, events []guard.Event) error
}

func (m mutant) Publish(ctx context.Context, events []guard.Event) error {
	if len(events) == 0 {
		return nil
	}
	return m.publish(m.Publisher, ctx, events)
}

// naive stores as any client does, without looking at what is there.
type naive struct {
	nc *natsgo.Conn
	js jetstream.JetStream
}

func (n naive) Close() { n.nc.Close() }
func (n naive) Publish(ctx context.Context, events []guard.Event) error {
	for i, e := range events {
		body, err := publish.Encode(e)
		m := natsgo.NewMsg(nats.Subject("cell.events", e.Tenant))
		m.Data = body
		publish.Headers(e, m.Header.Set)
		m.Header.Set(jetstream.MsgIDHeader, e.ID)
		if err == nil {
			_, err = n.js.PublishMsg(ctx, m)
		}
		if err != nil {
			return &guard.PartialError{Accepted: i, Err: errors.Join(context.Cause(ctx), err)}
		}
	}
	return nil
}

// The suite finds each fault.
func TestSuiteFindsFaults(t *testing.T) {
	type pub = publishertest.Publisher
	for _, c := range []struct {
		name    string
		section string
		publish func(p pub, ctx context.Context, events []guard.Event) error
	}{
		{"leaves the last one out", "order", func(p pub, ctx context.Context, ev []guard.Event) error {
			return p.Publish(ctx, ev[:max(1, len(ev)-1)])
		}},
		{"reverses", "order", func(p pub, ctx context.Context, ev []guard.Event) error {
			ev = slices.Clone(ev)
			slices.Reverse(ev)
			return p.Publish(ctx, ev)
		}},
		{"changes ids", "order", func(p pub, ctx context.Context, ev []guard.Event) error {
			ev = slices.Clone(ev)
			for i := range ev {
				ev[i].ID += "x"
			}
			return p.Publish(ctx, ev)
		}},
		{"a new id each time", "repeated", func(p pub, ctx context.Context, ev []guard.Event) error {
			ev = slices.Clone(ev)
			for i := range ev {
				ev[i].ID = natsgo.NewInbox()
			}
			return p.Publish(ctx, ev)
		}},
		{"does not wait", "answers-lost", func(p pub, ctx context.Context, ev []guard.Event) error {
			go func() { _ = p.Publish(ctx, ev) }()
			return nil
		}},
		{"leaves it behind at a pause", "pause", func(p pub, ctx context.Context, ev []guard.Event) error {
			done := make(chan error, 1)
			go func() { done <- p.Publish(context.WithoutCancel(ctx), ev) }()
			select {
			case err := <-done:
				return err
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}},
		{"counts one too many", "answers-lost", func(p pub, ctx context.Context, ev []guard.Event) error {
			err := p.Publish(ctx, ev)
			var partial *guard.PartialError
			if errors.As(err, &partial) {
				partial.Accepted++
			}
			return err
		}},
		{"hides why", "late", func(p pub, ctx context.Context, ev []guard.Event) error {
			if p.Publish(ctx, ev) != nil {
				return errors.New("failed")
			}
			return nil
		}},
		{"goes by the number", "recreated", func() func(pub, context.Context, []guard.Event) error {
			high := map[cells.TenantID]cells.EventSeq{}
			return func(p pub, ctx context.Context, ev []guard.Event) error {
				for _, e := range ev {
					if e.Seq > high[e.Tenant] {
						if err := p.Publish(ctx, []guard.Event{e}); err != nil {
							return err
						}
						high[e.Tenant] = e.Seq
					}
				}
				return nil
			}
		}()},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := harness(nil)
			h.Only, h.Patience = []string{c.section}, 3*time.Second
			h.Wrap = func(p pub) pub { return mutant{p, c.publish} }
			expectFailure(t, h)
		})
	}
	t.Run("does not look at what is there", func(t *testing.T) {
		h := harness(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
		var b *broker
		inner := h.Open
		h.Open = func(ctx context.Context) (publishertest.Broker, error) {
			got, err := inner(ctx)
			b, _ = got.(*broker)
			return got, err
		}
		var made []naive
		h.Wrap = func(pub) pub {
			nc, err := natsgo.Connect("nats://" + b.link.Addr())
			if err != nil {
				t.Fatal(err)
			}
			js, err := jetstream.New(nc)
			if err != nil {
				t.Fatal(err)
			}
			made = append(made, naive{nc: nc, js: js})
			return made[len(made)-1]
		}
		h.Only, h.Patience = []string{"behind"}, 3*time.Second
		expectFailure(t, h)
		for _, n := range made {
			n.Close()
		}
	})
}

func expectFailure(t *testing.T, h publishertest.Harness) {
	t.Helper()
	r := guardtest.Record(t.Context(), func(t guardtest.T) { publishertest.Run(t, h) })
	if !r.Failed() {
		t.Fatal("the suite has not found the fault")
	}
	if strings.Contains(r.Failures[0], "cannot open") || strings.Contains(r.Failures[0], "publisher:") || strings.Contains(r.Failures[0], "log of") {
		t.Fatal(r.Failures[0])
	}
	t.Log(r.Failures[0])
}

func TestConfig(t *testing.T) {
	for name, c := range map[string]nats.Config{
		"no url": {}, "stream": {URL: "nats://x", Stream: "a b"}, "prefix": {URL: "nats://x", Prefix: "a.*"}, "settle": {URL: "nats://x", Settle: -1},
		"not a url": {URL: "nats://[::1:x"},
	} {
		if p, err := nats.New(c); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
			p.Close()
		}
	}
	if got := nats.Subject("a", "x.y:z@w-_"); got != "a.x=2Ey:z@w-_" {
		t.Error(got)
	}
}
