// SPDX-License-Identifier: Apache-2.0

package kafka_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/publish"
	"github.com/cloister-dev/cloister/guard/publish/kafka"
	"github.com/cloister-dev/cloister/guard/publish/publishertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	topic      = "cell-events"
	partitions = 3
)

// broker is kfake: a broker that speaks Kafka's protocol, checks producers'
// sequences, and keeps its log on disk.
type broker struct {
	dir   string
	ports []int
	c     *kfake.Cluster
	link  *publishertest.Link
}

func open(context.Context) (publishertest.Broker, error) {
	dir, err := os.MkdirTemp("", "publish-kafka-")
	if err != nil {
		return nil, err
	}
	b := &broker{dir: dir}
	if err := b.Start(); err != nil {
		return nil, err
	}
	b.link, err = publishertest.NewLink(b.c.ListenAddrs()[0])
	return b, err
}

func (b *broker) Start() error {
	opts := []kfake.Opt{kfake.NumBrokers(1), kfake.SeedTopics(partitions, topic), kfake.DataDir(b.dir)}
	if b.ports != nil {
		opts = append(opts, kfake.Ports(b.ports...))
	}
	c, err := kfake.NewCluster(opts...)
	if err != nil {
		return err
	}
	b.c = c
	_, port, err := net.SplitHostPort(c.ListenAddrs()[0])
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(port)
	b.ports = []int{n}
	return err
}

func (b *broker) Stop() error { b.c.Close(); return nil }

func (b *broker) Close() {
	b.link.Close()
	b.c.Close()
	_ = os.RemoveAll(b.dir)
}

func (b *broker) Link() *publishertest.Link { return b.link }

func (b *broker) Publisher(context.Context) (publishertest.Publisher, error) {
	return kafka.New(kafka.Config{Brokers: []string{b.link.Addr()}, Settle: time.Second,
		// The broker tells its own address.
		Options: []kgo.Opt{kgo.Dialer(func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, b.link.Addr())
		})}})
}

func (b *broker) Log(ctx context.Context, tenant cells.TenantID) ([]guard.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cl, err := kgo.NewClient(kgo.SeedBrokers(b.c.ListenAddrs()...), kgo.ConsumeTopics(topic), kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxWait(50*time.Millisecond))
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	req := kmsg.NewPtrListOffsetsRequest()
	req.ReplicaID = -1
	t := kmsg.NewListOffsetsRequestTopic()
	t.Topic = topic
	for i := range int32(partitions) {
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.Partition, p.Timestamp = i, -1
		t.Partitions = append(t.Partitions, p)
	}
	req.Topics = append(req.Topics, t)
	resp, err := req.RequestWith(ctx, cl)
	if err != nil {
		return nil, err
	}
	left := 0
	for _, t := range resp.Topics {
		for _, p := range t.Partitions {
			left += int(p.Offset)
		}
	}
	var out []guard.Event
	for left > 0 {
		f := cl.PollFetches(ctx)
		if err := f.Err0(); err != nil {
			return nil, err
		}
		for _, r := range f.Records() {
			left--
			if string(r.Key) != string(tenant) {
				continue
			}
			e, err := publish.Decode(r.Value)
			if err != nil {
				return nil, err
			}
			got := map[string]string{}
			for _, h := range r.Headers {
				got[h.Key] = string(h.Value)
			}
			if want := fmt.Sprint(map[string]string{publish.HeaderID: e.ID, publish.HeaderTenant: string(tenant), publish.HeaderSeq: fmt.Sprint(e.Seq), publish.HeaderEpoch: fmt.Sprint(e.Epoch), publish.HeaderCell: string(e.Cell)}); fmt.Sprint(got) != want {
				return nil, fmt.Errorf("headers %v, want %s", got, want)
			}
			out = append(out, e)
		}
	}
	return out, nil
}

func TestConformance(t *testing.T) {
	publishertest.Run(guardtest.Wrap(t), publishertest.Harness{Open: open})
}

// Within a session the producer's own retries are stored once: an answer is lost
// with its connection, and the publication goes on.
func TestOnceWithinASession(t *testing.T) {
	b, err := open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	p, err := b.Publisher(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var batch []guard.Event
	for i := range 6 {
		batch = append(batch, guard.Event{Tenant: "acme", Seq: cells.EventSeq(i + 1), Epoch: 1, ID: fmt.Sprint("id-", i+1), Payload: []byte("1")})
	}
	if err := p.Publish(t.Context(), batch[:3]); err != nil {
		t.Fatal(err)
	}
	b.Link().LoseAnswers()
	done := make(chan error, 1)
	go func() { done <- p.Publish(t.Context(), batch[3:]) }()
	var log []guard.Event
	for deadline := time.Now().Add(time.Minute); len(log) < 4; {
		if log, err = b.Log(t.Context(), "acme"); err != nil || time.Now().After(deadline) {
			t.Fatalf("the event is not stored: %v", err)
		}
	}
	b.Link().Release()
	b.Link().Cut()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if log, err = b.Log(t.Context(), "acme"); err != nil || len(log) != 6 {
		t.Errorf("%d events are stored, want 6 (%v)", len(log), err)
	}
	// Another session knows nothing of it: the same events are stored again, with the
	// ids by which consumers drop them.
	q, err := b.Publisher(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	if err := q.Publish(t.Context(), batch[5:]); err != nil {
		t.Fatal(err)
	}
	if log, err = b.Log(t.Context(), "acme"); err != nil || len(log) != 7 || log[6].ID != log[5].ID {
		t.Errorf("after a fail-over %d events are stored, want 7 (%v)", len(log), err)
	}
}

// A tenant is in one partition whoever publishes, and an event that the broker does
// not take stops those behind it.
func TestOrderIsKept(t *testing.T) {
	b, err := open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	p, err := b.Publisher(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ev := func(seq cells.EventSeq, payload string) guard.Event {
		return guard.Event{Tenant: "acme", Seq: seq, Epoch: 1, ID: fmt.Sprint("id-", seq), Payload: []byte(payload)}
	}
	large := ev(2, `"`+strings.Repeat("x", 2<<20)+`"`)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	err = p.Publish(ctx, []guard.Event{ev(1, "1"), large, ev(3, "1")})
	if guard.Accepted(err, 3) != 1 || !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("an event that is too large: %v", err)
	}
	if log, err := b.Log(t.Context(), "acme"); err != nil || len(log) != 1 {
		t.Errorf("%d events are stored, want 1 (%v)", len(log), err)
	}
}

func TestConfig(t *testing.T) {
	for name, c := range map[string]kafka.Config{
		"no broker": {}, "topic": {Brokers: []string{"x:1"}, Topic: "a/b"}, "dots": {Brokers: []string{"x:1"}, Topic: ".."},
		"settle": {Brokers: []string{"x:1"}, Settle: -1}, "option": {Brokers: []string{"x:1"}, Options: []kgo.Opt{kgo.ProducerBatchMaxBytes(-1)}},
	} {
		if p, err := kafka.New(c); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
			p.Close()
		}
	}
}
